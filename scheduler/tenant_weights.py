"""Weights of tenants, as a setting says them."""

LEAST_WEIGHT = 0.001  # of a tenant


def parse_weights(text: str) -> dict[str, float]:
    """Returns weights by tenant. Raises ValueError."""
    weights = dict[str, float]()
    for part in text.split(","):
        name, equals, number = part.strip().rpartition("=")
        try:
            weight = float(number)
        except ValueError:
            weight = 0.0
        if not name or not equals or not LEAST_WEIGHT <= weight <= 1 / LEAST_WEIGHT:
            bounds = f"[{LEAST_WEIGHT}, {1 / LEAST_WEIGHT:.0f}]"
            raise ValueError(f"--tenant-weights has {part.strip()!r}, must be NAME=WEIGHT, with a weight in {bounds}")
        if name in weights:
            raise ValueError(f"--tenant-weights names {name!r} twice")
        weights[name] = weight
    return weights
