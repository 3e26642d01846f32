"""The tuning page: plain HTML that draws what the server computed."""

from pathlib import Path

PAGE = Path(__file__).with_name("index.html")

__all__ = ["PAGE"]
