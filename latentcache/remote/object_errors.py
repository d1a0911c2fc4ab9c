"""What an object store refused, as an error that says the next step."""

from __future__ import annotations

import re

from latentcache.errors import RemoteError

UNAUTHORIZED, FORBIDDEN, NOT_IMPLEMENTED = 401, 403, 501
"""Statuses of HTTP."""
_STATUS = re.compile(r"status code: (\d{3})")
_REASON = re.compile(r"<Message>(.*?)</Message>", re.DOTALL)
_NO_CREDENTIALS = re.compile(
    r"169\.254\.169\.254|Missing (AccessKeyId|SecretAccessKey)|Account must be specified|service account|Access Key:"
)
PANIC = "PanicException"
"""The class of what obstore raises where its Rust code fails: it has no other name in Python."""
_RUN_AGAIN = "then run the same again: nothing that was stored is lost."


def problem(url: str, what: str, error: BaseException) -> RemoteError:
    """The error for what obstore met: its first line is for people, the rest repeats it."""
    text = str(error)
    met = text.partition("\n\nDebug source")[0].partition("<?xml")[0].strip(" :\n")
    found, reason = _STATUS.search(text), _REASON.search(text)
    status = None if found is None else int(found[1])
    if reason is not None:
        met = f"status {status}: {reason[1]}"
    step = f"Check the URL, the store's endpoint (AWS_ENDPOINT_URL) and the network, {_RUN_AGAIN}"
    if type(error).__name__ == PANIC:
        met = f"obstore cannot use a value of the environment ({met})"
        step = "Check AWS_ENDPOINT_URL (https://HOST:PORT), AWS_REGION and AWS_ACCESS_KEY_ID, also for line breaks."
    elif status in (UNAUTHORIZED, FORBIDDEN) or _NO_CREDENTIALS.search(text):
        step = (
            "Give credentials that may do this, as the store's own tools take them: AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, GOOGLE_APPLICATION_CREDENTIALS, AZURE_STORAGE_ACCOUNT_NAME and "
            f"AZURE_STORAGE_ACCOUNT_KEY, or the machine's role; {_RUN_AGAIN}"
        )
    elif "NoSuchBucket" in text:
        step = "Check the URL; the store's own tools make a bucket."
    elif "kind: Timeout" in text and "method: PUT" in text:
        step = f"The store hangs, or the line to it is slower than 4 Mbit/s, which sending packs needs; {_RUN_AGAIN}"
    elif "BadScheme" in text:
        step = "Use https, or set AWS_ALLOW_HTTP=true where nobody reads what is sent."
    return RemoteError(url, f"{what}: {met[:500].rstrip('.')}", step, status=status)
