"use strict";
(() => {
  // Charts: the titles of the drawing serve readers without script; with it they become one tooltip.
  for (const figure of document.querySelectorAll(".gantt")) {
    const svg = figure.querySelector("svg"), tip = figure.querySelector(".tip"), status = figure.querySelector("[role=status]");
    const boxes = [...svg.querySelectorAll("rect")].map((rect) => {
      const title = rect.querySelector("title"), text = title.textContent;
      title.remove();
      const box = { rect, text, x: parseFloat(rect.getAttribute("x")), width: parseFloat(rect.getAttribute("width")), y: parseFloat(rect.getAttribute("y")) };
      return box;
    });
    const by = new Map(boxes.map((box) => [box.rect, box]));
    let current = null;
    const leave = () => { if (current) current.rect.classList.remove("on"); current = null; tip.hidden = true; };
    const enter = (box, say) => {
      if (current) current.rect.classList.remove("on");
      current = box;
      box.rect.classList.add("on");
      tip.textContent = box.text;
      tip.hidden = false;
      const stage = tip.parentElement.clientWidth, centre = (box.x + box.width / 2) / 100 * stage;
      tip.style.left = Math.max(0, Math.min(stage - tip.offsetWidth, centre - tip.offsetWidth / 2)) + "px";
      tip.style.top = box.y + 30 + "px";
      if (say) status.textContent = box.text;
    };
    svg.addEventListener("pointerover", (event) => { const box = by.get(event.target); if (box) enter(box, false); });
    svg.addEventListener("pointerleave", leave);
    svg.addEventListener("click", (event) => { const box = by.get(event.target); if (box) enter(box, false); });
    svg.addEventListener("focus", () => { if (!current && boxes.length && svg.matches(":focus-visible")) enter(boxes[0], true); });
    svg.addEventListener("blur", leave);
    svg.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || !boxes.length) return;
      const from = current || boxes[0], lane = boxes.filter((box) => box.y === from.y), place = lane.indexOf(from);
      const lanes = [...new Set(boxes.map((box) => box.y))].sort((a, b) => a - b), at = lanes.indexOf(from.y);
      const near = (step) => {
        const other = boxes.filter((box) => box.y === lanes[at + step]), middle = from.x + from.width / 2;
        return other.sort((a, b) => Math.abs(a.x + a.width / 2 - middle) - Math.abs(b.x + b.width / 2 - middle))[0];
      };
      const moves = {
        ArrowRight: () => lane[place + 1], ArrowLeft: () => lane[place - 1],
        ArrowDown: () => near(1), ArrowUp: () => near(-1),
        Home: () => lane[0], End: () => lane[lane.length - 1],
      };
      if (event.key === "Escape") { leave(); return; }
      if (!(event.key in moves)) return;
      event.preventDefault();
      enter(moves[event.key]() || from, true);
    });
  }

  // Verdicts to show.
  const form = document.getElementById("filter"), rows = [...document.querySelectorAll("tr[data-verdict]")];
  const say = document.getElementById("filter-status");
  form.hidden = false;
  const apply = () => {
    const wanted = new Set([...form.querySelectorAll("input:checked")].map((input) => input.value));
    let shown = 0;
    for (const row of rows) { row.hidden = !wanted.has(row.dataset.verdict); shown += !row.hidden; }
    for (const body of document.querySelectorAll(".numbers tbody")) {
      const group = body.querySelector("tr.group");
      if (group) group.hidden = !body.querySelector("tr[data-verdict]:not([hidden])");
    }
    say.textContent = shown === rows.length ? "" : `${shown} of ${rows.length} rows shown`;
  };
  form.addEventListener("change", apply);
  form.addEventListener("submit", (event) => event.preventDefault());
  apply();

  // On paper everything is open.
  let opened = [];
  addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll("details.more:not([open])")];
    for (const each of opened) each.open = true;
  });
  addEventListener("afterprint", () => { for (const each of opened) each.open = false; });
})();
