// What both pages need: the key, errors, elements.

const KEY = "atoll-key";

/** An element with attributes and children; text is never HTML. */
export function make(name, attributes = {}, ...children) {
  const svg = ["svg", "rect", "title"].includes(name);
  const one = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) one.addEventListener(key.slice(2), value);
    else if (value !== null && value !== false) one.setAttribute(key, value === true ? "" : value);
  }
  one.append(...children);
  return one;
}

/** A request with the key of this tab; a refusal is an Error that says why, and asks for a key where one is missing. */
export async function ask(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...(options.headers ?? {}), ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  const response = await fetch(path, { ...options, headers });
  if (response.ok || response.status === 304) return response;
  const access = document.querySelector("#access");
  if (response.status === 401) {
    access.hidden = false;
    access.open = true;
  }
  const body = await response.json().catch(() => ({}));
  const error = new Error(body.error?.message ?? `the server answered ${response.status}`);
  error.status = response.status;
  error.after = Number(response.headers.get("Retry-After")) || null;
  throw error;
}

/** Take a key from the page's form, then do something again. */
export function onKey(again) {
  const access = document.querySelector("#access");
  access.querySelector("form").addEventListener("submit", (event) => {
    event.preventDefault();
    sessionStorage.setItem(KEY, new FormData(event.target).get("key").trim());
    access.open = false;
    again();
  });
}
