"use strict";
// Sorting and filtering of the table of points; without scripts the table is complete and in order of rank.
(() => {
  const table = document.getElementById("points");
  if (!table) return;
  const body = table.tBodies[0];
  const rows = Array.from(body.rows);
  const words = document.getElementById("filter");
  const status = document.getElementById("status");
  const shown = document.getElementById("shown");

  function key(row, column) {
    const text = row.cells[column].dataset.v;
    const number = Number(text);
    return text === "" ? null : Number.isNaN(number) ? text : number;
  }

  function compare(a, b) {
    if (typeof a === "number" && typeof b === "number") return a - b;
    return String(a).localeCompare(String(b), "en", { numeric: true });
  }

  function sortBy(header) {
    const column = header.cellIndex;
    const down = header.getAttribute("aria-sort") === "ascending";
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", down ? "descending" : "ascending");
    const sorted = rows.map((row, index) => ({ row, index, value: key(row, column) }));
    // What has no value comes last in both directions; equal values keep the order of rank.
    sorted.sort((a, b) => {
      if (a.value === null || b.value === null) return (a.value === null) - (b.value === null) || a.index - b.index;
      return (down ? -1 : 1) * compare(a.value, b.value) || a.index - b.index;
    });
    body.append(...sorted.map((item) => item.row));
  }

  function filter() {
    const wanted = words.value.toLowerCase().split(/\s+/).filter(Boolean);
    let count = 0;
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      const match = wanted.every((word) => text.includes(word)) && (!status.value || row.dataset.status === status.value);
      row.hidden = !match;
      count += match;
    }
    shown.textContent = `${count} of ${rows.length}`;
  }

  for (const header of table.tHead.rows[0].cells) {
    header.querySelector("button").addEventListener("click", () => sortBy(header));
  }
  words.addEventListener("input", filter);
  status.addEventListener("change", filter);
  filter();
})();
