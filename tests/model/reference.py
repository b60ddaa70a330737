"""The sampler as one would write it on a blackboard: one sample at a time, no batches, no tricks."""

import torch


def reference_sample(
    experts, router, cond, null, noise, steps, strategy, guidance, draws, every=1, missing=(), null_draws=None
):
    """Latents `(B, C, H, W)` and weights `(steps, B, K)`; `draws[step][i]` are the uniforms of sample i.

    With `null_draws` the null branch is served by one expert, drawn at every step.
    """
    latents, history = [], []
    for i in range(len(noise)):
        x, own, seen = noise[i : i + 1], cond.select(slice(i, i + 1)), []
        for step in range(steps):
            t = torch.tensor([1 - step / steps])
            if step == 0 or (strategy != "once" and step % every == 0):
                w = weights(strategy, posterior(router, x, t, own, missing), draws[step][i])
                w_null = posterior(router, x, t, null, missing) if strategy == "full" else w
            if null_draws is not None:
                w_null = weights("once", posterior(router, x, t, null, missing), null_draws[step][i])
            v = velocity(experts, w, x, t, own)
            if guidance != 1:
                v_null = velocity(experts, w_null, x, t, null)
                v = v_null + guidance * (v - v_null)
            x = x - v / steps
            seen.append(torch.tensor(w))
        latents.append(x)
        history.append(torch.stack(seen))
    return torch.cat(latents), torch.stack(history, dim=1)


def velocity(experts, weights, x, t, cond):
    return sum(w * expert.velocity(x, t, cond) for w, expert in zip(weights, experts, strict=True) if w)


def posterior(router, x, t, cond, missing):
    p = router.logits(x, t, cond)[0].double().exp().tolist()
    p = [0.0 if k in missing else value for k, value in enumerate(p)]
    return [value / sum(p) for value in p]


def weights(strategy, p, uniforms):
    if strategy == "full":
        return p
    if strategy == "once":  # one draw: the first expert whose cumulative probability exceeds it
        chosen = next(k for k in range(len(p)) if sum(p[: k + 1]) > uniforms[0])
        return [float(k == chosen) for k in range(len(p))]
    best = sorted(p, reverse=True)[: int(strategy.removeprefix("top-"))]
    kept = [value if value in best else 0.0 for value in p]
    return [value / sum(kept) for value in kept]
