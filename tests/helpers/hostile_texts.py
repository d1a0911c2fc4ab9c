"""Texts that do harm if a page prints them without escaping, or uses them as a URL."""

from __future__ import annotations

_CALL = "window.harmed=1"
_MARKUP = [
    f"<script>{_CALL}</script>",
    f"</script><script>{_CALL}</script>",
    f'"><img src=x onerror={_CALL}>',
    f"'><img src=x onerror={_CALL}>",
    f"`><img src=x onerror={_CALL}>",
    f"<svg><script>{_CALL}</script></svg>",
    f"<iframe srcdoc='<script>parent.{_CALL}</script>'></iframe>",
    f"<input autofocus onfocus={_CALL}>",
    f'<a href="javascript:{_CALL}">x</a>',
    "<link rel=stylesheet href=//elsewhere.example/x.css>",
    "<style>*{background:url(//elsewhere.example/x)}</style>",
    "<meta http-equiv=refresh content='0;url=//elsewhere.example'>",
    "<base href=//elsewhere.example/>",
    "<!--",
    "--><h1>owned</h1>",
    f"</title><script>{_CALL}</script>",
    f"</bdi></span></a><script>{_CALL}</script>",
    f'<noscript><p title="</noscript><img src=x onerror={_CALL}>">',
    "<div hx-get=/v1/metrics hx-trigger=load>x</div>",
    f"<div hx-on:click={_CALL} hx-trigger=load>x</div>",
]
_ATTRIBUTES = [
    f'" onmouseover={_CALL} x="',
    f"' onfocus={_CALL} autofocus x='",
    f"javascript:{_CALL}",
    "//elsewhere.example/x",
    "?dataset=other&id=x#y",
    "%22%3E%3Cscript%3E",
]
_TEMPLATES = ["{{ 7 * 7 }}", "{% for x in y %}", "${7*7}", "#{7*7}", "{{ ''.__class__.__mro__ }}"]
_LETTERS = [
    "\u202emirrored\u202c and \u2066isolated",
    "a\x00b\x1b[31m\x7f",
    "lone \ud800 and \udcff surrogates",
    "line\nbreaks\r\nand\ttabs",
    "zalgo " + "h\u0353\u034a\u034e" * 40,
    "w" * 4000,
    "\ufeff\u200b\u00ad",
    "<ſcript>" + _CALL,
]
HOSTILE = tuple(_MARKUP + _ATTRIBUTES + _TEMPLATES + _LETTERS)
