// The playground: a client of the same API as everybody else's.

import { ask, make, onKey } from "/assets/common.js";

const form = document.querySelector("#settings");
const told = document.querySelector("#told");
const another = document.querySelector("#another");
const results = document.querySelector("#results");
const DRAWN = ["prompt", "seed", "n", "steps", "guidance", "size", "negative"];
let models = {}; // by name, as /v1/models tells
let columns = []; // names of models and strategies that draw side by side
let drawing = null; // what stops the drawing under way
let adding = null; // a column that the server is asked about
let known = null; // the question for the models: until its answer a link's "monolith" may be a model or a strategy

const say = (text) => (told.textContent = text);

// Models and settings.

async function begin() {
  say("");
  try {
    const list = (await ask("/v1/models").then((answer) => answer.json())).data;
    models = Object.fromEntries(list.map((one) => [one.id, one]));
  } catch (error) {
    return say(error.message);
  }
  const first = models[Object.keys(models)[0]];
  if (!first.atoll) {
    say("The server is starting …");
    return setTimeout(begin, 1000);
  }
  const { condition, steps, guidance } = first.atoll;
  form.steps.placeholder = steps;
  form.guidance.placeholder = guidance;
  form.prompt.disabled = condition === "none";
  form.prompt.placeholder = { text: "describe the image", class: "class number", none: "no prompt" }[condition];
  form.size.placeholder = first.atoll.size;
  document.querySelector("#size-label").hidden = first.atoll.sizes.length < 2;
  document.querySelector("#sizes").replaceChildren(...first.atoll.sizes.map((value) => make("option", { value })));
  document.querySelector("#negative-label").hidden = condition !== "text";
  document.querySelector("#examples").replaceChildren(
    ...(first.atoll.prompts ?? []).map((text) => make("button", { type: "button", onclick: () => (form.prompt.value = text) }, make("bdi", {}, text))),
  );
  const names = Object.keys(models).map((name) => name.replace(/^ensemble:/, ""));
  document.querySelector("#strategies").replaceChildren(...names.map((value) => make("option", { value })));
  if (!columns.length) show([first.atoll.routing ?? first.id]);
}

/** The model and the strategy of a column's name. */
const split = (name) => (name !== "ensemble" && models[name] ? { model: name } : name === "ensemble" ? { model: name } : { model: "ensemble", routing: name });

function show(names) {
  columns = names;
  document.querySelector("#columns").replaceChildren(
    ...names.map((name) =>
      make("li", { class: "chip" }, name,
        names.length > 1 && make("button", { type: "button", "aria-label": `Remove ${name}`, onclick: () => show(columns.filter((one) => one !== name)) }, "×") || ""),
    ),
  );
}

/** Add a column; what the server does not know is said at once, before anything is drawn. Whether it is there. */
async function add(name) {
  const clean = name.trim().replace(/^ensemble:/, "").toLowerCase();
  if (!clean || columns.includes(clean)) return true;
  const { model, routing } = split(clean);
  const problem = await ask(`/v1/models/${encodeURIComponent(routing ? `${model}:${routing}` : model)}`).then(() => "", (error) => error.message);
  say(problem);
  another.setAttribute("aria-invalid", Boolean(problem));
  if (problem) return false;
  another.value = "";
  show([...columns, clean]);
  return true;
}

function settings() {
  const chosen = Object.fromEntries(DRAWN.map((name) => [name, form[name].value.trim()]));
  if (chosen.seed === "") form.seed.value = chosen.seed = String(crypto.getRandomValues(new Uint32Array(1))[0] >>> 1);
  return { ...chosen, columns };
}

function link(chosen) {
  const pairs = new URLSearchParams(DRAWN.filter((name) => chosen[name] !== "").map((name) => [name, chosen[name]]));
  for (const name of chosen.columns) pairs.append("by", name);
  return `#${pairs}`;
}

function restore() {
  const pairs = new URLSearchParams(location.hash.slice(1));
  for (const name of DRAWN) form[name].value = pairs.get(name) ?? "";
  form.n.value ||= "1";
  if (pairs.getAll("by").length) show(pairs.getAll("by"));
}

function again() {
  restore();
  draw();
}

// Drawing.

async function draw() {
  await known;
  await adding;
  if (!columns.length || !Object.keys(models).length) return; // nothing is known of the models yet, and the page says why
  drawing?.abort();
  const chosen = settings();
  history.replaceState(null, "", link(chosen));
  const stop = (drawing = new AbortController());
  const count = Math.max(1, Number(chosen.n) || 1);
  const panels = chosen.columns.map((name) => panel(name, count, chosen));
  results.replaceChildren(make("div", { class: "panels" }, ...panels.map((one) => one.element)));
  say("Generating …");
  document.querySelector("#stop").hidden = false;
  const started = performance.now();
  const ended = await Promise.allSettled(panels.map((one) => stream(one, chosen, count, stop.signal)));
  if (drawing !== stop) return;
  drawing = null;
  document.querySelector("#stop").hidden = true;
  ended.forEach(({ reason }, number) => reason && panels[number].fail(reason));
  const failed = ended.filter(({ status }) => status === "rejected").length;
  say(stop.signal.aborted ? "Stopped." : failed ? "" : `Generated in ${((performance.now() - started) / 1000).toFixed(1)} s.`);
  if (!failed) remember(chosen, panels[0]);
}

async function stream(one, chosen, count, signal) {
  const { model, routing } = split(one.name);
  const numbers = Object.fromEntries(["steps", "guidance"].filter((name) => chosen[name] !== "").map((name) => [name, Number(chosen[name])]));
  const body = { prompt: form.prompt.disabled ? "" : chosen.prompt, model, n: count, stream: true, partial_images: 3, ...numbers };
  if (routing) body.routing = routing;
  if (chosen.size) body.size = chosen.size;
  if (chosen.negative && models[model]?.atoll?.condition === "text") body.negative = chosen.negative;
  // The seed has 63 bits, which a number of JavaScript's would round to another seed.
  const text = JSON.stringify(body).replace(/\}$/, `,"seed":${BigInt(chosen.seed)}}`);
  const answer = await ask("/v1/images/generations", { method: "POST", signal, headers: { "Content-Type": "application/json" }, body: text });
  for await (const event of events(answer.body)) {
    if (event.error) throw new Error(event.error.message);
    one.take(event);
  }
}

/** Server-sent events of a body, as objects. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    const parts = text.split("\n\n");
    text = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").find((line) => line.startsWith("data: "))?.slice(6);
      if (data && data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

// Pictures and strips.

function panel(name, count, chosen) {
  const cells = Array.from({ length: count }, () => {
    const image = make("img", { class: "shot", alt: "", hidden: true });
    const frame = make("div", { class: "frame waiting" }, image);
    const below = make("div", { class: "below" });
    return { image, frame, below, element: make("figure", {}, frame, below) };
  });
  const note = make("p", { class: "notice alarm", role: "alert", hidden: true });
  const element = make("section", { class: "panel" }, make("h2", {}, make("bdi", {}, name)), note, make("div", { class: "shots" }, ...cells.map((one) => one.element)));
  return {
    name, element,
    take(event) {
      const { image, frame, below } = cells[event.number];
      const done = event.type.endsWith("completed");
      image.src = `data:image/${event.output_format};base64,${event.b64_json}`;
      image.alt = `${chosen.prompt || "image"}, ${name}, number ${event.number + 1}${done ? "" : ", preview"}`;
      image.hidden = false;
      frame.style.aspectRatio = event.size.replace("x", " / ");
      frame.classList.toggle("waiting", !done);
      frame.classList.toggle("small", Number(event.size.split("x")[0]) <= 64);
      if (done) below.replaceChildren(...about(event, name, chosen));
    },
    fail(error) {
      if (error.name === "AbortError") return;
      note.hidden = false;
      note.textContent = error.message + (error.after ? ` (try again in ${error.after} s)` : "");
      for (const { image, frame, element } of cells) {
        frame.classList.remove("waiting");
        element.hidden = image.hidden; // nothing comes any more
      }
    },
    picture: () => cells[0].image.src,
  };
}

/** Who painted a picture: its strip, what it says of a step, and experts that may be left out. */
function about(event, name, chosen) {
  if (!event.routing) return [];
  const steps = byStep(event.routing.steps, event.steps);
  const said = make("output", {}, words(steps[0], 0, steps.length));
  const used = {};
  for (const { experts } of steps) for (const [expert, weight] of Object.entries(experts)) used[expert] = (used[expert] ?? 0) + weight / steps.length;
  const clusters = Object.values(models)[0].atoll.clusters ?? {}; // what is known of each expert's cluster
  const strongest = Object.entries(used).sort((a, b) => b[1] - a[1]);
  const label = strongest.map(([expert, share]) => `expert ${expert} ${percent(share)}`).join(", ");
  const tell = (number) => (said.textContent = words(steps[number], number, steps.length));
  let at = 0;
  const strip = make("svg", {
    class: "strip", viewBox: `0 0 ${10 * steps.length} 100`, preserveAspectRatio: "none", tabindex: "0", role: "slider",
    "aria-label": `Experts by step: ${label}`, "aria-valuemin": "1", "aria-valuemax": steps.length, "aria-valuenow": "1", "aria-valuetext": words(steps[0], 0, steps.length),
    onpointermove: (event) => tell(Math.min(steps.length - 1, Math.max(0, Math.floor((steps.length * event.offsetX) / strip.clientWidth)))),
    onfocus: () => tell(at),
    onkeydown: (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1, Home: -steps.length, End: steps.length }[event.key];
      if (!move) return;
      event.preventDefault();
      at = Math.min(steps.length - 1, Math.max(0, at + move));
      strip.setAttribute("aria-valuenow", at + 1);
      strip.setAttribute("aria-valuetext", words(steps[at], at, steps.length));
      tell(at);
    },
  }, ...steps.flatMap(cellsOf));
  const all = models.ensemble?.atoll?.experts ?? 0;
  const out = strongest.slice(0, 6).map(([expert, share]) =>
    make("button", { type: "button", class: `chip e${expert}`, disabled: all < 2, title: [`Generate without expert ${expert}`, clusters[expert]].filter(Boolean).join(": "), onclick: () => without(expert, name) }, `${expert}: ${percent(share)}`));
  return [strip, said, make("div", { class: "experts" }, ...out)];
}

/** Experts and probabilities of every step: what is told once holds until something else is. */
function byStep(entries, count) {
  const steps = [];
  let experts = {}, probabilities = null, next = 0;
  for (let number = 0; number < count; number++) {
    if (next < entries.length && entries[next].step === number) {
      ({ experts } = entries[next]);
      probabilities = entries[next].probabilities ?? probabilities;
      next++;
    }
    steps.push({ experts, probabilities });
  }
  return steps;
}

function cellsOf({ experts }, number) {
  let top = 0;
  const total = Object.values(experts).reduce((a, b) => a + b, 0) || 1;
  return Object.entries(experts).map(([expert, weight]) => {
    const height = (100 * weight) / total;
    const cell = make("rect", { class: `fill e${expert}`, x: 10 * number, y: top, width: 10, height });
    top += height;
    return cell;
  });
}

const percent = (share) => `${Math.round(100 * share)}%`;
const listed = (pairs) => pairs.filter(([, weight]) => weight >= 0.01).sort((a, b) => b[1] - a[1]).slice(0, 4).map(([expert, weight]) => `${expert} ${percent(weight)}`).join(", ");

function words({ experts, probabilities }, number, count) {
  const router = probabilities ? `; router: ${listed(Object.entries(probabilities))}` : "";
  return `step ${number + 1} of ${count}: expert ${listed(Object.entries(experts))}${router}`;
}

/** The same noise again, with one expert left out beside it. */
async function without(expert, name) {
  const { routing } = split(name);
  const base = routing ?? models.ensemble.atoll.routing;
  const [conditional, ...rest] = base.split(" null ");
  const [strategy, out = ""] = conditional.split(" without ");
  const left = [...new Set([...out.split(",").filter(Boolean), expert].map(Number))].sort((a, b) => a - b);
  adding = add([`${strategy} without ${left.join(",")}`, ...rest].join(" null "));
  if (await adding) draw();
}

// History.

function remember(chosen, one) {
  const list = document.querySelector("#history ol");
  document.querySelector("#history").hidden = false;
  const place = link(chosen);
  for (const old of [...list.children]) if (old.dataset.place === place) old.remove();
  list.prepend(make("li", { "data-place": place },
    // A link to where the page is already is no change of its address.
    make("a", { href: place, title: chosen.columns.join(", "), onclick: () => location.hash === place && again() }, make("img", { class: "shot", src: one.picture(), alt: "" }), make("bdi", {}, chosen.prompt || "no prompt"))));
  while (list.childElementCount > 24) list.lastElementChild.remove();
}

form.addEventListener("submit", (event) => { event.preventDefault(); draw(); });
form.prompt.addEventListener("keydown", (event) => { if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); form.requestSubmit(); } });
document.querySelector("#dice").addEventListener("click", () => { form.seed.value = ""; draw(); });
document.querySelector("#stop").addEventListener("click", () => drawing?.abort());
document.querySelector("#add").addEventListener("click", () => (adding = add(another.value)));
another.addEventListener("keydown", (event) => { if (event.key === "Enter") { event.preventDefault(); document.querySelector("#add").click(); } });
document.querySelector("#link").addEventListener("click", async () => {
  const place = new URL(link(settings()), location.href).href;
  history.replaceState(null, "", place);
  await navigator.clipboard?.writeText(place).then(() => say("Copied."), () => say("Copy the link from the address bar."));
});
addEventListener("hashchange", again);
onKey(() => (known = begin()));
if (location.hash.length > 1) restore();
known = begin();
