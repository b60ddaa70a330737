"""A single model as a stock diffusers pipeline, which runs where there is no Atoll."""


def check_settings(family: str, vae: str) -> None:
    """Refuse a student that no stock pipeline runs."""
