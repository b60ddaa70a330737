"""The model card, README.md: written from the cards of the parts and from what is known of the campaign."""

from collections.abc import Mapping, Sequence
from typing import Any

from atoll.encoders.licences import LICENCES
from atoll.ensemble.card import Card

PAPER = "Decentralized Diffusion Models (McAllister, Tancik, Song, Kanazawa, arXiv 2501.05450)"
UNKNOWN = "not stated"


def model_card(
    router: Card,
    experts: Mapping[int, Card],
    k: int,
    about: Mapping[str, Any],
    defaults: Mapping[str, Any],
    picture: bool,
    name: str = "FOLDER",
) -> str:
    """Text of README.md, with the hub's metadata at its head.

    Args:
        router: its card.
        experts: cards of the experts that are there, by number.
        k: number of clusters.
        about: what the cards do not say: `name`, `data`, `partition`, `monolith`, `evaluation`, `picture`.
            Everything is optional, and what is missing is said to be missing.
        defaults: `num_inference_steps`, `guidance_scale`, `routing` of a call that names none.
        picture: whether `picture.png` lies beside it.
        name: how the snippet calls the folder.
    """
    title = str(about.get("name") or "Ensemble")
    blocks = [head_block(router, about), f"# {title}", _summary(router, experts, k)]
    if picture:
        blocks.append(f"![Samples](picture.png)\n\n{_caption(about.get('picture') or {})}")
    blocks += [
        "## Use\n\n" + _snippet(router, name),
        _defaults(defaults, router),
        "## Experts\n\n" + _experts(experts, k),
        "## Data and partition\n\n" + data_block(router, about),
        "## Training compute\n\n" + _compute(router, experts, about),
        "## Evaluation\n\n" + evaluation_block(about.get("evaluation")),
        "## Encoders\n\n" + encoders_block(router),
        "## Licences\n\n" + licences_block(router, about),
        f"The method: {PAPER}. Made with Atoll {router.provenance.get('atoll', '')}".rstrip() + ".",
    ]
    return "\n\n".join(blocks) + "\n"


def head_block(router: Card, about: Mapping[str, Any]) -> str:
    """The hub's metadata."""
    kind = {"text": "text-to-image", "class": "unconditional-image-generation"}.get(router.condition)
    licence = str(about.get("licence") or "other")
    lines = ["---", "library_name: diffusers", f"license: {licence}"]
    lines.append(f"pipeline_tag: {kind or 'unconditional-image-generation'}")
    return "\n".join([*lines, "tags:", "- atoll", "- decentralized-diffusion", "- diffusers", "---"])


def _summary(router: Card, experts: Mapping[int, Card], k: int) -> str:
    shape, total = router.shape, sum(card.parameters for card in experts.values())
    what = {"text": "texts", "class": f"{shape.classes} class labels", "none": "nothing"}[router.condition]
    lines = (
        f"A decentralized diffusion model: {len(experts)} experts, trained apart from each other on {k}"
        " clusters of one data set, and a router that says which of them knows a noisy picture. Conditioned"
        f" on {what}; latents of {shape.channels}x{shape.size}x{shape.size}."
        f" {count(total)} parameters in the experts, {count(router.parameters)} in the router."
    )
    missing = [number for number in range(k) if number not in experts]
    if missing:
        lines += (
            f"\n\n**Partial: experts {listed(missing)} of {k} are missing.** What they would have drawn is"
            " drawn by the others, whose weights are made to sum to 1."
        )
    return lines


def _caption(picture: Mapping[str, Any]) -> str:
    settings = [
        f"{picture[key]} {word}" if word == "steps" else f"{word} {picture[key]}"
        for key, word in (
            ("steps", "steps"),
            ("guidance", "guidance"),
            ("routing", "routing"),
            ("seed", "seed"),
        )
        if key in picture
    ]
    prompts = [f"“{prompt}”" for prompt in picture.get("prompts", [])]
    return (", ".join([*prompts, *settings]) or "Samples of this ensemble") + "."


def _snippet(router: Card, name: str) -> str:
    call = {"text": '"a prompt"', "class": "class_labels=[0]", "none": ""}[router.condition]
    return "\n".join(
        [
            "```python",
            "import torch",
            "from atoll import AtollPipeline",
            "",
            f'pipe = AtollPipeline.from_pretrained("{name}")',
            f"result = pipe({call + ', ' if call else ''}generator=torch.Generator().manual_seed(0))",
            'result.images[0].save("picture.png")',
            "```",
        ]
    )


def _defaults(defaults: Mapping[str, Any], router: Card) -> str:
    guidance = f", guidance {defaults['guidance_scale']:g}" if router.condition != "none" else ""
    return (
        f"A call that says nothing else takes {defaults['num_inference_steps']} steps{guidance} and routing"
        f" `{defaults['routing']}`."
    )


def _experts(experts: Mapping[int, Card], k: int) -> str:
    rows = []
    for number in range(k):
        card = experts.get(number)
        if card is None:
            rows.append([str(number), "**missing**", *[""] * 6])
            continue
        start = card.provenance.get("init", {}).get("kind", "")
        rows.append(
            [
                str(number),
                card.family,
                f"{card.prediction}, {card.schedule}",
                count(card.parameters),
                f"{card.rows:,}",
                f"{card.samples:,}",
                f"{card.train_flops:.3g}",
                str(start),
            ]
        )
    titles = "expert, family, predicts, parameters, training rows, samples seen, training FLOPs, started from"
    return table(titles.split(", "), rows)


def data_block(router: Card, about: Mapping[str, Any]) -> str:
    """Data and partition."""
    data, cut = about.get("data") or {}, about.get("partition") or {}
    encoder = cut.get("encoder") or {}
    how = f"{cut['method']} on features of {encoder.get('name')}" if encoder else cut.get("method", UNKNOWN)
    rows = [
        ["source", str(data.get("source", UNKNOWN))],
        ["rows", f"{data['rows']:,}" if "rows" in data else UNKNOWN],
        ["training rows by cluster", ", ".join(f"{n:,}" for n in cut.get("sizes", [])) or UNKNOWN],
        ["clustering", str(how)],
        ["partition", f"`{router.partition}`"],
    ]
    return table(["", ""], rows)


def _compute(router: Card, experts: Mapping[int, Card], about: Mapping[str, Any]) -> str:
    spent = {
        "experts": sum(card.train_flops for card in experts.values()),
        "router": router.train_flops,
    }
    if about.get("pretrain_flops"):
        spent["shared pretraining"] = float(about["pretrain_flops"])
    rows = [[name, f"{value:.3g}"] for name, value in spent.items()]
    rows.append(["together", f"{sum(spent.values()):.3g}"])
    for role, what in (("monolith", "the monolith it is compared with"), ("student", "a student of it")):
        if about.get(f"{role}_flops"):
            rows.append([what, f"{float(about[f'{role}_flops']):.3g}"])
    return table(["", "training FLOPs"], rows)


def evaluation_block(evaluation: Mapping[str, Any] | None) -> str:
    """The comparison, if there is one."""
    if not evaluation:
        return "Not evaluated."
    metric = evaluation["metric"]
    lines = (
        f"{metric['distance']}, to {metric['reference_rows']:,} {metric['reference']}; {metric['samples']:,}"
        f" samples, {metric['steps']} steps, guidance {metric['guidance']:g}. Lower is better.\n\n"
    )
    rows = [[row["name"], f"{row['distance']:.4g}"] for row in evaluation["rows"]]
    return lines + table(["model or routing", "distance"], rows)


def encoders_block(router: Card) -> str:
    """The frozen encoders, by name and hash."""
    rows = [["latents", str(router.latents["name"]), f"`{router.latents['hash'] or '-'}`"]]
    if router.text is not None:
        rows.append(["text", str(router.text["name"]), f"`{router.text['hash']}`"])
    return table(["", "encoder", "digest of its weights"], rows)


def licences_block(router: Card, about: Mapping[str, Any]) -> str:
    """Of weights, data and encoders."""
    data = about.get("data") or {}
    rows = [
        ["these weights", str(about.get("licence") or f"{UNKNOWN}: ask whoever trained them")],
        ["data", str(data.get("licence") or UNKNOWN)],
    ]
    for what, producer in (("VAE", router.latents), ("text encoder", router.text)):
        if producer and producer["name"] != "none":
            rows.append([f"{what} {producer['name']}", LICENCES.get(producer["name"], UNKNOWN)])
    return table(["", "licence"], rows)


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of Markdown."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def count(number: int) -> str:
    """A number in thousands, millions, billions."""
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)


def listed(numbers: Sequence[int]) -> str:
    """Numbers for a sentence."""
    return ", ".join(map(str, numbers))
