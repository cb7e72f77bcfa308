"use strict";

// Tables: a click on a heading sorts by its column, a second click the other way round.
for (const button of document.querySelectorAll("table.sortable th button")) {
  button.addEventListener("click", () => {
    const heading = button.closest("th");
    const table = heading.closest("table");
    const column = heading.cellIndex;
    const up = heading.getAttribute("aria-sort") !== "ascending";
    for (const other of table.querySelectorAll("th[aria-sort]")) other.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", up ? "ascending" : "descending");
    const key = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent;
    const body = table.tBodies[0];
    const rows = [...body.rows].sort((a, b) => {
      const [x, y] = [key(a), key(b)];
      const numbers = x !== "" && y !== "" && !isNaN(x) && !isNaN(y);
      return (numbers ? x - y : x.localeCompare(y)) * (up ? 1 : -1);
    });
    body.append(...rows);
  });
}

// Plots with a line for each domain: the names above them bring out one line in all of them.
const names = [...document.querySelectorAll("[data-highlight]")];
let kept = null;
const show = (chosen) => {
  for (const line of document.querySelectorAll("[data-domain]")) {
    line.classList.toggle("faded", chosen !== null && line.dataset.domain !== chosen);
  }
  for (const name of names) name.setAttribute("aria-pressed", String(name.dataset.highlight === kept));
};
for (const name of names) {
  name.addEventListener("pointerenter", () => show(name.dataset.highlight));
  name.addEventListener("pointerleave", () => show(kept));
  name.addEventListener("click", () => {
    kept = kept === name.dataset.highlight ? null : name.dataset.highlight;
    show(kept);
  });
}
