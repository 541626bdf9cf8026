"""A hook of MkDocs: take the addresses of the site from [project.urls] in pyproject.toml."""

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig


def on_config(config: "MkDocsConfig") -> "MkDocsConfig":
    """Set `site_url` and `repo_url` where the project has these addresses."""
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())[
        "project"
    ]
    urls = project.get("urls", {})
    config.site_url = urls.get("Documentation", config.site_url)
    config.repo_url = urls.get("Repository", config.repo_url)
    return config
