"""Reference of all settings in Markdown, the content of docs/configuration.md; a test compares the two."""

from __future__ import annotations

from collections.abc import Iterator

from deepspeed_nmt.config import NAMED, RunConfig, setting_classes


def settings_reference() -> str:
    """Return the page: a table of settings, defaults and meanings for each section.

    Settings that several parts of a section share are listed once.
    """
    lines = ["# Settings", "", "Written by `deepspeed_nmt.settings_reference`; a test compares.", ""]
    for section in RunConfig.model_fields:
        for title, rows in _tables(section):
            lines += [f"## {title}", "", "| setting | default | meaning |", "|---|---|---|", *rows, ""]
    return "\n".join(lines)


def _tables(section: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the title and the rows of each table of a section."""
    if section in NAMED:
        registry = NAMED[section]
        yield section, [_row(f"{section}.name", registry.default, f"one of {', '.join(registry)}")]
        parts_of_row: dict[str, list[str]] = {}
        for prefix, part, config in setting_classes(section):
            for key, field in config.model_fields.items():
                if key != "name":
                    row = _row(f"{prefix}.{key}", field.default, field.description)
                    parts_of_row.setdefault(row, []).append(part)
        for parts in dict.fromkeys(map(tuple, parts_of_row.values())):
            rows = [row for row, having in parts_of_row.items() if tuple(having) == parts]
            yield f"{section}: {', '.join(parts)}", rows
    else:
        for prefix, _, config in setting_classes(section):
            rows = [
                _row(f"{prefix}.{key}", field.default, field.description)
                for key, field in config.model_fields.items()
            ]
            yield prefix.replace(".", ": "), rows


def _row(setting: str, default: object, description: str | None) -> str:
    return f"| `{setting}` | `{default}` | {description or ''} |"
