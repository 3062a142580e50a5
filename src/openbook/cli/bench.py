def run() -> None:
    """Not yet."""
