// The dashboard: what the server tells, again and again.

import { ask, onKey } from "/assets/common.js";

const told = document.querySelector("#told");
const every = 1000 * Number(document.querySelector("#every").dataset.seconds);
let tag = null;

async function look() {
  try {
    const answer = await ask("/dashboard/now", tag ? { headers: { "If-None-Match": tag } } : {});
    if (answer.status !== 304) {
      tag = answer.headers.get("ETag");
      document.querySelector("#now").innerHTML = await answer.text(); // escaped by the server, and no script runs
    }
    told.hidden = true;
  } catch (error) {
    told.hidden = false;
    told.textContent = `Not up to date: ${error.message}.`;
  }
}

async function still() {
  const place = document.querySelector("#still");
  if (!place.childElementCount) place.innerHTML = await ask("/dashboard/still").then((a) => a.text()).catch(() => "");
}

async function go() {
  await look();
  await still();
}

onKey(go);
await go();
setInterval(() => document.hidden || go(), every);
