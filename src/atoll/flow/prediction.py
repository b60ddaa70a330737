"""What networks predict, exact conversion between predictions and between schedules, and guidance.

Every prediction is a mixture `a x0 + b eps`; so is the state, `x_t = alpha x0 + sigma eps`. Two
mixtures determine any third, so each conversion is `f(t) x_t + g(t) value` with two numbers per
sample, computed in float64 whatever the dtype of the images.
"""

from collections.abc import Callable
from functools import lru_cache

import torch
from jaxtyping import Float
from torch import Tensor

from atoll.flow.schedule import RectifiedFlow, Schedule, expand
from atoll.flow.settings import Prediction

Predict = Callable[[Tensor, Tensor], Tensor]
Pair = tuple[Tensor, Tensor]

RECTIFIED = RectifiedFlow()

NOISE_EDGE = 0.995
"""Last rectified-flow time at which an eps or score network is asked: beyond it `v = (eps - x_t) / (1 - t)`
would magnify the network's error more than 200 times."""

DATA_EDGE = 1e-4
"""Smallest t that `v = (x_t - x0) / t` divides by; in float32 it costs about 1e-3 of rounding."""

MOST_WEIGHT = 400.0
"""Of a squared error that is taken in velocity: JiT (arXiv 2511.13720) divides by no t below 0.05."""


def same_snr_time(t: Float[Tensor, "B"], source: Schedule, target: Schedule) -> Float[Tensor, "B"]:
    """The time of `target` at which its SNR is that of `source` at `t`; at most the end of its range."""
    return t if source == target else target.time_of_log_snr(source.log_snr(t))


@lru_cache(maxsize=64)  # asked at every call of an expert that is converted
def exact_range(schedule: Schedule, prediction: Prediction) -> tuple[float, float]:
    """The rectified-flow times between which `flow_velocity` is exact for such a network.

    The whole of [0, 1] for v on a schedule that covers it; cut at `DATA_EDGE` for x0, at `NOISE_EDGE`
    for eps and score, and at the range of the schedule (ddpm-linear: 0.0099 to 0.9937).
    """
    lo, hi = same_snr_time(torch.tensor(schedule.t_range, dtype=torch.float64), schedule, RECTIFIED).tolist()
    lo = max(lo, DATA_EDGE) if prediction == "x0" else lo
    hi = min(hi, NOISE_EDGE) if prediction in ("eps", "score") else hi
    return lo, hi


def flow_velocity(
    predict: Predict,
    prediction: Prediction,
    schedule: Schedule,
    x_t: Float[Tensor, "B C H W"],
    t: Float[Tensor, "B"],
    bound: float | None = None,
) -> Float[Tensor, "B C H W"]:
    """The rectified-flow velocity at (x_t, t) of a network trained on another schedule or prediction.

    The network is asked at the time and scale of equal SNR, and its answer is turned into v (Heterogeneous
    DDM, arXiv 2603.06741). A network with prediction "v" on rectified flow is passed through untouched.

    Within `exact_range` the result is exact: rounding is about 1e-16 / (1 - t) for eps and score and
    1e-16 / t for x0 in float64. Outside, the network is asked at the end of its range and its x0 gives
    `v = (x_t - x0) / max(t, DATA_EDGE)`: finite for every t in [0, 1], and a step from t >= DATA_EDGE to 0
    lands on that x0. With an exact network the error is then at most `D tanh(w / 4) / t`, where D is the
    diameter of the data and w the spread over the data of the change in log-likelihood: about `r |x_t| D`
    at the noise end, r = (1 - hi) / hi; negligible at the data end if data are further apart than the noise.

    An error of eps is magnified 1 / (1 - t) times in v, so that near noise a trained network says nothing of
    use. With a `bound` its x0 is held to what the data can be. That leaves an exact network as it is: its x0
    is a mean over data points, which lies within any box that they lie in.

    Args:
        predict: the network, `(x (B, C, H, W), tau (B,)) -> (B, C, H, W)`, in its own schedule's time.
        bound: largest absolute value of the data, if it is known; 1 for pixels.
    """
    if schedule == RECTIFIED and prediction == "v":
        return predict(x_t, t)
    lo, hi = exact_range(schedule, prediction)
    now = t.double()
    tau = same_snr_time(now.clamp(lo, hi), RECTIFIED, schedule)
    # x_tau / x_t: the ratio of the larger of the two parts, so never a division by little.
    alpha, sigma = RECTIFIED.alpha(now), RECTIFIED.sigma(now)
    scale = torch.where(alpha > sigma, schedule.alpha(tau) / alpha, schedule.sigma(tau) / sigma)
    answer = predict(x_t * _like(scale, x_t), tau.to(t.dtype))

    one, nil = torch.ones_like(now), torch.zeros_like(now)
    f, g = _conversion(tau, schedule, prediction, (-one, one))  # straight to eps - x0
    f_x0, g_x0 = _conversion(tau, schedule, prediction, (one, nil))
    below, inside = now.clamp(min=DATA_EDGE), (now >= lo) & (now <= hi)
    f = torch.where(inside, f * scale, (1 - f_x0 * scale) / below)
    g = torch.where(inside, g, -g_x0 / below)
    v = _like(f, x_t) * x_t + _like(g, answer) * answer
    if bound is None:
        return v
    x0 = x_t - _like(now, x_t) * v
    return v + (x0 - x0.clamp(-bound, bound)) / _like(below, x_t)


def velocity_weight(t: Float[Tensor, "B"], schedule: Schedule, prediction: Prediction) -> Float[Tensor, "B"]:
    """How many times the squared error of a prediction is that of `eps - x0`, at most `MOST_WEIGHT`.

    For x0 on rectified flow it is `1 / t^2`.
    """
    now = t.double()
    gain = _conversion(now, schedule, prediction, (-torch.ones_like(now), torch.ones_like(now)))[1]
    return gain.square().clamp(max=MOST_WEIGHT).to(t.dtype)


def _mixture(prediction: Prediction, t: Tensor, schedule: Schedule) -> Pair:
    """(a, b) with value = a x0 + b eps. A score, -eps / sigma, is handled as its eps: finite at sigma = 0."""
    one, nil = torch.ones_like(t), torch.zeros_like(t)
    if prediction == "v":
        return schedule.d_alpha(t), schedule.d_sigma(t)
    return (one, nil) if prediction == "x0" else (nil, one)


def _conversion(t: Tensor, schedule: Schedule, source: Prediction, target: Pair) -> Pair:
    """(f, g) with f x_t + g value = target (Cramer's rule on the state and the value)."""
    alpha, sigma = schedule.alpha(t), schedule.sigma(t)
    (a, b), (p, q) = _mixture(source, t, schedule), target
    determinant = alpha * b - sigma * a
    f, g = (p * b - q * a) / determinant, (alpha * q - sigma * p) / determinant
    return (f, -sigma * g) if source == "score" else (f, g)


def _like(values: Tensor, x: Tensor) -> Tensor:
    return expand(values, x).to(x.dtype)


def guide(
    v_cond: Float[Tensor, "B C H W"], v_null: Float[Tensor, "B C H W"], scale: float | Float[Tensor, "B"]
) -> Float[Tensor, "B C H W"]:
    """Classifier-free guidance (arXiv 2207.12598): `v_null + scale (v_cond - v_null)`, at 1 `v_cond` exactly.

    The scale is the paper's `1 + w`.
    """
    if isinstance(scale, Tensor):
        each = _like(scale, v_cond)
        return torch.where(each == 1, v_cond, v_null + each * (v_cond - v_null))
    return v_cond if scale == 1 else v_null + scale * (v_cond - v_null)
