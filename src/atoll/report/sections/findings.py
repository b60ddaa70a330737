"""Tables that were left for the report: concepts, scores of looks, rows that were kept."""

from atoll.campaign.report_table import ReportTable, findings
from atoll.report.facts import Facts


def section(facts: Facts) -> list[ReportTable]:
    """All of them."""
    return findings(facts.store)
