"use strict";
(() => {
  const tip = document.getElementById("tip");
  const show = (text, event) => {
    tip.textContent = text;
    tip.hidden = false;
    const { width, height } = tip.getBoundingClientRect();
    const left = Math.max(8, Math.min(event.clientX + 14, innerWidth - width - 8));
    const above = event.clientY - height - 14;
    tip.style.left = left + "px";
    tip.style.top = (above > 4 ? above : event.clientY + 18) + "px";
  };
  // A browser's own tooltip comes late and looks foreign: a mark's title moves to the page's tooltip.
  const textOf = (mark) => {
    const title = mark.querySelector(":scope > title");
    if (title) {
      mark.dataset.tip = title.textContent;
      title.remove();
    }
    return mark.dataset.tip;
  };
  document.addEventListener("pointermove", (event) => {
    const target = event.target instanceof Element ? event.target : null;
    const plot = target && target.closest("svg[data-series]");
    if (plot) return follow(plot, event);
    const mark = target && target.closest("rect.k, rect.bar, [data-tip], text.bad");
    const text = mark && textOf(mark);
    if (text) show(text.split(" · ").join("\n"), event);
    else tip.hidden = true;
  });

  let cursor = null;
  const clear = () => {
    if (cursor) cursor.remove();
    cursor = null;
    tip.hidden = true;
  };
  const follow = (plot, event) => {
    if (!plot.parsed) plot.parsed = JSON.parse(plot.dataset.series);
    const box = plot.getBoundingClientRect();
    const share = (event.clientX - box.left) / box.width;
    const lines = [];
    let at = null;
    for (const series of plot.parsed) {
      let near = null;
      for (const point of series.at) {
        if (!near || Math.abs(point[0] - share) < Math.abs(near[0] - share)) near = point;
      }
      if (!near) continue;
      at = at || near;
      lines.push(series.name + " " + near[3]);
    }
    if (!at) return;
    if (!cursor || cursor.ownerSVGElement !== plot) {
      if (cursor) cursor.remove();
      cursor = document.createElementNS("http://www.w3.org/2000/svg", "line");
      cursor.setAttribute("class", "cursor");
      cursor.setAttribute("y1", 0);
      cursor.setAttribute("y2", plot.dataset.height);
      plot.append(cursor);
    }
    for (const end of ["x1", "x2"]) cursor.setAttribute(end, at[0] * 100 + "%");
    show("step " + at[2] + "\n" + lines.join("\n"), event);
  };
  document.querySelectorAll("svg[data-series]").forEach((plot) => plot.addEventListener("pointerleave", clear));

  const section = document.getElementById("timeline");
  if (!section) return;
  const pick = section.querySelector(".pick");
  const select = pick.querySelector("select");
  const zoom = pick.querySelector("input");
  const shown = section.querySelector(".shown");
  const kept = new Map([[shown.dataset.step, shown.innerHTML]]);
  section.querySelectorAll("template").forEach((t) => kept.set(t.dataset.step, t.innerHTML));
  const scale = () => {
    const drawing = shown.querySelector(".spans");
    if (drawing) drawing.style.width = Math.pow(2, zoom.value) * 100 + "%";
  };
  const draw = () => {
    shown.innerHTML = kept.get(select.value);
    scale();
  };
  select.addEventListener("change", draw);
  pick.querySelectorAll("button").forEach((button) => button.addEventListener("click", () => {
    const next = select.selectedIndex + Number(button.dataset.move);
    if (next >= 0 && next < select.options.length) {
      select.selectedIndex = next;
      draw();
    }
  }));
  zoom.addEventListener("input", () => {
    // The middle of what is seen stays in the middle.
    const scroll = shown.querySelector(".scroll");
    const middle = (scroll.scrollLeft + scroll.clientWidth / 2) / scroll.scrollWidth;
    scale();
    scroll.scrollLeft = middle * scroll.scrollWidth - scroll.clientWidth / 2;
  });
  pick.hidden = false;
})();
