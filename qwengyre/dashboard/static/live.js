// Looks again while a run goes on, and puts in what changed: elements with data-live-id, by their id. Nothing that a reader unfolded or
// holds the focus in is lost. A page that did not change is answered with 304, and costs a look at the sizes of some files.
"use strict";

const seconds = Number(document.body.dataset.live);
const lamp = document.getElementById("live");
let tag = null;
let timer = null;

function say(text, css) {
  lamp.textContent = text;
  lamp.className = "live " + css;
}

function isBusy(element) {
  const selection = document.getSelection();
  const selects = selection && !selection.isCollapsed && element.contains(selection.anchorNode);
  return selects || (element.contains(document.activeElement) && document.activeElement.matches("input, select"));
}

function replace(fresh) {
  for (const now of document.querySelectorAll("[data-live-id]")) {
    const next = fresh.querySelector(`[data-live-id="${CSS.escape(now.dataset.liveId)}"]`);
    if (!next || isBusy(now)) continue;
    for (const details of now.querySelectorAll("details[id]")) {
      const same = next.querySelector("#" + CSS.escape(details.id));
      if (same) same.open = details.open;
    }
    for (const box of now.querySelectorAll("input:checked")) {
      const same = next.querySelector(`input[name="${CSS.escape(box.name)}"][value="${CSS.escape(box.value)}"]`);
      if (same) same.checked = true;
    }
    if (next.innerHTML === now.innerHTML) continue;
    const focused = now.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
    now.replaceChildren(...next.childNodes);
    if (focused) now.querySelector(`a[href="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
  }
  document.dispatchEvent(new Event("live"));
}

async function look() {
  try {
    const answer = await fetch(location.href, { headers: tag ? { "if-none-match": tag } : {}, cache: "no-store" });
    if (answer.status === 200) {
      tag = answer.headers.get("etag");
      const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
      replace(fresh);
      document.body.dataset.live = fresh.body.dataset.live;
    } else if (answer.status !== 304) {
      throw new Error(answer.status);
    }
    say("live", "on");
  } catch {
    say("not reached", "off");
  }
  plan();
}

function plan() {
  clearTimeout(timer);
  const every = Number(document.body.dataset.live);
  if (!every) return say("", "");
  timer = setTimeout(() => (document.hidden ? plan() : look()), every * 1000);
}

if (seconds) {
  say("live", "on");
  plan();
  document.addEventListener("visibilitychange", () => document.hidden || look());
}

// What is read on demand: the page that the link inside leads to, without its frame.
document.addEventListener("toggle", async (event) => {
  const details = event.target;
  if (!details.open || !details.dataset?.src || details.dataset.read) return;
  details.dataset.read = "1";
  try {
    const answer = await fetch(details.dataset.src);
    const found = new DOMParser().parseFromString(await answer.text(), "text/html").querySelector(".fragment");
    if (!found) throw new Error(answer.status);
    details.replaceChildren(details.querySelector("summary"), found);
  } catch {
    delete details.dataset.read;
  }
}, true);
