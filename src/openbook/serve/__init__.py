"""The explorer: a page on 127.0.0.1 that shows every step of a model, and the HTTP interface behind it.

`app.make_app(Explorer(...))` is an ASGI application; `openbook explore` runs it. docs/explore.md describes
the interface and what guards it.
"""
