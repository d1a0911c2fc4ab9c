"""`latentcache browse`: it opens the browser at the page, and ends with Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from http.cookiejar import CookieJar
from pathlib import Path

import pytest
from helpers.page_server import photo_cache
from helpers.serving import wait_until


def test_browse_opens_the_page_in_the_browser(tmp_path: Path) -> None:
    photo_cache(tmp_path, 3)
    opened = tmp_path / "opened"
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {opened}.part && mv {opened}.part {opened}\n', encoding="ascii")
    browser.chmod(0o755)
    command = [sys.executable, "-m", "latentcache", "browse", str(tmp_path / "cache"), "--json"]
    environment = {**os.environ, "BROWSER": f"{browser} %s"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = json.loads(process.stdout.readline())["url"]
            assert url.startswith("http://127.0.0.1:")
            wait_until(opened.exists, 30)
            base, _, login = url.partition("/login?")
            argument = opened.read_text(encoding="ascii").strip()
            assert login not in argument, "every account can read the browser's command line"
            file = Path(urllib.request.url2pathname(urllib.parse.urlsplit(argument).path))
            assert f"url={url}" in file.read_text(encoding="ascii")
            assert os.name == "nt" or not file.parent.stat().st_mode & 0o077
            photo = f"{base}/photo?dataset=photos&id=000.png"
            for stranger in (photo, f"{base}/", f"{base}/v1/manifests/photos", f"{base}/login?token=wrong"):
                with pytest.raises(urllib.error.HTTPError, match=r"401|403"):  # any account of this machine
                    urllib.request.urlopen(stranger)
            browser_session = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
            with browser_session.open(url) as answer:
                assert answer.status == 200 and answer.url == f"{base}/", "the token leaves the address"
                assert login.removeprefix("token=") not in answer.read().decode()
            with browser_session.open(photo) as answer:
                assert answer.headers["Content-Type"] == "image/webp"
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 130
            assert not file.parent.exists(), "the token stays on no disk"
        finally:
            process.kill()
