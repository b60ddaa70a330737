"""Tables that were left for the report: concepts, scores of looks, rows that were kept."""

from atoll.campaign.finding import Finding, findings
from atoll.report.facts import Facts


def section(facts: Facts) -> list[Finding]:
    """All of them."""
    return findings(facts.store)
