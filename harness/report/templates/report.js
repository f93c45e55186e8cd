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

  // What to show, by verdict and by what ours is. It stands in the address, so that a view can be sent to somebody.
  const form = document.getElementById("filter"), rows = [...document.querySelectorAll("tr[data-verdict]")];
  const say = document.getElementById("filter-status"), reset = document.getElementById("filter-reset");
  const choices = ["verdict", "evidence"];
  const boxesOf = (name) => [...form.querySelectorAll(`input[name=${name}]`)];
  const narrow = matchMedia("(max-width: 40rem)");
  form.hidden = false;
  const isFiltered = () => choices.some((name) => boxesOf(name).some((box) => !box.checked));
  const read = () => {
    const query = new URLSearchParams(location.search);
    for (const name of choices) {
      const known = boxesOf(name).map((box) => box.value), asked = query.get(name);
      const wanted = asked === null ? known : asked.split(",").filter((value) => known.includes(value));
      // A name that this page does not have is of another page; "none" is nobody's.
      for (const box of boxesOf(name)) box.checked = wanted.includes(box.value) || (!wanted.length && asked !== "none");
    }
  };
  const write = () => {
    const url = new URL(location.href);
    for (const name of choices) {
      const boxes = boxesOf(name), wanted = boxes.filter((box) => box.checked).map((box) => box.value);
      if (wanted.length === boxes.length) url.searchParams.delete(name);
      else url.searchParams.set(name, wanted.join(",") || "none");
    }
    url.search = url.search.replaceAll("%2C", ",");
    history.replaceState(null, "", url);
  };
  const hasRow = (element) => element.querySelector("tr[data-verdict]:not([hidden])") !== null;
  const apply = () => {
    const [verdicts, evidences] = choices.map((name) => new Set(boxesOf(name).filter((box) => box.checked).map((box) => box.value)));
    const counts = new Map(boxesOf("verdict").map((box) => [box.value, 0]));
    let shown = 0;
    for (const row of rows) {
      row.hidden = !verdicts.has(row.dataset.verdict) || !evidences.has(row.dataset.evidence);
      if (row.hidden) continue;
      shown += 1;
      counts.set(row.dataset.verdict, counts.get(row.dataset.verdict) + 1);
    }
    const filtered = isFiltered();
    for (const body of document.querySelectorAll(".cards tbody")) {
      const group = body.querySelector("tr.group");
      if (group) group.hidden = !hasRow(body);
    }
    for (const part of document.querySelectorAll("article.table > details:has(.cards)")) {
      part.hidden = !hasRow(part);
      if (filtered && part.classList.contains("part")) part.open = true;
    }
    for (const table of document.querySelectorAll("article.table")) table.hidden = filtered && !hasRow(table);
    const each = boxesOf("verdict").filter((box) => counts.get(box.value)).map((box) => `${counts.get(box.value)} ${box.dataset.name}`);
    say.textContent = filtered ? `${shown} of ${rows.length} rows shown${each.length ? ": " + each.join(", ") : ""}` : "";
    reset.hidden = !filtered;
  };
  form.addEventListener("change", () => { write(); apply(); });
  form.addEventListener("submit", (event) => event.preventDefault());
  const showAll = () => {
    for (const box of form.querySelectorAll("input")) box.checked = true;
    write();
    apply();
  };
  reset.addEventListener("click", () => { showAll(); form.querySelector("input").focus(); });
  addEventListener("popstate", () => { read(); apply(); });
  // On a phone the long parts are closed until they are asked for.
  if (narrow.matches) for (const each of document.querySelectorAll("details.part, details.drawn, .experiment details.more")) each.open = false;
  read();
  apply();

  // A link leads to its place even if that is filtered out or closed.
  const follow = () => {
    const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (!target) return;
    if (target.closest("[hidden]")) showAll();
    const inner = target.matches("article") ? target.querySelector("details.part, details.drawn") : target.closest("details");
    if (inner) inner.open = true;
    target.scrollIntoView();
  };
  addEventListener("hashchange", follow);
  follow();

  // On paper everything is open.
  let opened = [];
  addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll("details:is(.more, .part, .drawn):not([open])")];
    for (const each of opened) each.open = true;
  });
  addEventListener("afterprint", () => { for (const each of opened) each.open = false; });
})();
