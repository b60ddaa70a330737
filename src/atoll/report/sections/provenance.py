"""What made what: hashes, encoders, versions."""

from typing import Any

from atoll.report.facts import Facts


def section(facts: Facts) -> dict[str, Any]:
    """Names of facts, with a digest and words of each."""
    partition, compared = facts.partition, facts.comparison
    cards = [run.card for run in facts.runs if run.card]
    lines = [
        ("Partition", partition.hash, f"{partition.method}, K = {partition.k}"),
        ("Clustered by", *_encoder(partition.encoder)),
        ("Latents", *_encoder(cards[0].latents if cards else None)),
        ("Text states", *_encoder(cards[0].text if cards else None)),
        ("Judged by", *_encoder(compared.metric if compared else None)),
    ]
    versions = sorted({f"torch {card.provenance['torch']}" for card in cards if card.provenance.get("torch")})
    lines.append(("Code", "", ", ".join([f"atoll {facts.frozen.code}", *versions])))
    return {"lines": [line for line in lines if line[2]], "runs": [run for run in facts.runs if run.card]}


def _encoder(about: dict[str, Any] | None) -> tuple[str, str]:
    """Hash and name of what made a column."""
    if not about:
        return "", ""
    name = str(about.get("name") or "")
    name = "none: pixels as they are" if name == "none" else name
    size = about.get("size") or about.get("max_length")
    unit = "px" if about.get("size") else "tokens"
    return str(about.get("hash") or ""), name + (f", {size} {unit}" if size else "")
