// Tables of a page: sorted by a click on a heading, filtered by what is typed above them.
(() => {
  "use strict";
  const key = (cell) => cell.dataset.sort !== undefined ? Number(cell.dataset.sort) : cell.textContent.trim();
  const missing = (value) => value === "\u2013" || Number.isNaN(value);
  const order = (a, b, sign) => {
    const left = key(a), right = key(b);
    if (missing(left) || missing(right)) return missing(left) - missing(right);
    if (typeof left === "number" && typeof right === "number") return (left - right) * sign;
    return String(left).localeCompare(String(right), undefined, { numeric: true }) * sign;
  };
  for (const box of document.querySelectorAll(".sortable .qz-table")) {
    const body = box.querySelector("tbody");
    const heads = [...box.querySelectorAll("thead th")];
    heads.forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = head.textContent;
      head.replaceChildren(button);
      button.addEventListener("click", () => {
        const up = head.getAttribute("aria-sort") !== "ascending";
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", up ? "ascending" : "descending");
        const rows = [...body.rows].sort((a, b) => order(a.cells[column], b.cells[column], up ? 1 : -1));
        body.append(...rows);
      });
    });
    const input = document.createElement("input");
    input.type = "search";
    input.placeholder = "Filter rows";
    input.setAttribute("aria-label", "Filter rows of: " + box.getAttribute("aria-label"));
    input.addEventListener("input", () => {
      const wanted = input.value.toLowerCase();
      for (const row of body.rows) row.hidden = !row.textContent.toLowerCase().includes(wanted);
    });
    box.before(input);
  }
})();
