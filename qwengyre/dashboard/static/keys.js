// The keyboard: rows, pages, folds. Every key does what a link or a click does, too.
"use strict";

let current = -1;
const help = document.getElementById("keys");
const opener = document.getElementById("keys-open");
opener.hidden = false;
opener.addEventListener("click", () => help.showModal());

const rows = () => [...document.querySelectorAll("[data-row]")];

function go(step) {
  const all = rows();
  if (!all.length) return;
  const focused = all.findIndex((row) => row.contains(document.activeElement));
  const from = focused >= 0 ? focused : current;
  current = Math.max(0, Math.min(all.length - 1, from + step));
  mark();
  const row = all[current];
  (row.querySelector("[data-open]") ?? row).focus({ preventScroll: true });
  row.scrollIntoView({ block: row.offsetHeight > innerHeight ? "start" : "nearest" });
}

function mark() {
  rows().forEach((row, at) => row.classList.toggle("here", at === current));
}

function fold() {
  const all = [...document.querySelectorAll("main details:not(.tokens)")];
  const open = all.some((one) => !one.open);
  for (const one of all) one.open = open;
}

const KEYS = {
  j: () => go(1),
  k: () => go(-1),
  "/": () => document.querySelector("[data-search]")?.focus(),
  "[": () => document.querySelector('a[rel="prev"]')?.click(),
  "]": () => document.querySelector('a[rel="next"]')?.click(),
  o: fold,
  u: () => [...document.querySelectorAll(".crumbs a")].at(-1)?.click(),
  "?": () => help.showModal(),
};

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || help.open) return;
  if (event.target.matches("input, select, textarea")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const act = KEYS[event.key];
  if (act) {
    event.preventDefault();
    act();
  }
});
document.addEventListener("live", mark);
