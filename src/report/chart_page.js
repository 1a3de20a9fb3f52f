// Charts of a page: the value under the pointer, and a switch between linear and logarithmic axes. A figure holds the
// data of its chart as JSON, and a drawing for each choice of axes whose attributes tell where a value is.
"use strict";
for (const figure of document.querySelectorAll("figure.plot")) {
  const data = JSON.parse(figure.querySelector("script").textContent);
  const drawings = [...figure.querySelectorAll(".drawing")];
  const boxes = [...figure.querySelectorAll("input")];
  const tip = figure.querySelector(".tip");
  figure.querySelector(".axes").hidden = false;

  const choose = () => {
    const chosen = boxes.map(box => box.checked ? "1" : "0").join("");
    for (const drawing of drawings) drawing.hidden = drawing.dataset.log !== chosen;
    leave();
  };

  // Where values are in a drawing, in its own pixels.
  const axis = (text, size) => {
    const [log, low, high] = text.split(" ").map(Number);
    return value => {
      if (value === null || (log && value <= 0)) return NaN;
      return size * ((log ? Math.log10(value) : value) - low) / (high - low);
    };
  };

  const shown = value => {
    if (value !== 0 && (Math.abs(value) >= 1e6 || Math.abs(value) < 1e-3)) return value.toExponential(3);
    return String(Number(value.toPrecision(5)));
  };

  const make = (parent, name, attributes) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const key in attributes) made.setAttribute(key, attributes[key]);
    parent.append(made);
    return made;
  };

  const leave = () => {
    tip.hidden = true;
    for (const old of figure.querySelectorAll("g.pointer")) old.remove();
  };

  const move = (svg, event) => {
    leave();
    const [left, top, width, height] = svg.dataset.plot.split(" ").map(Number);
    const placeX = axis(svg.dataset.x, width), placeY = axis(svg.dataset.y, height);
    const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
    const pointer = at.x - left;
    if (pointer < -20 || pointer > width + 20 || at.y < top - 20 || at.y > top + height + 20) return;
    // The nearest point of each series; of them the nearest decides where the line is.
    const found = [];
    for (const series of data.series) {
      let best = null;
      series.x.forEach((x, i) => {
        const distance = Math.abs(placeX(x) - pointer);
        if (!Number.isNaN(distance) && !Number.isNaN(placeY(series.y[i])) && (!best || distance < best.distance))
          best = {series, i, distance};
      });
      if (best) found.push(best);
    }
    if (found.length === 0) return;
    const nearest = found.reduce((a, b) => b.distance < a.distance ? b : a);
    const x = nearest.series.x[nearest.i];
    const beside = found.filter(one => Math.abs(placeX(one.series.x[one.i]) - placeX(x)) <= width / 40);
    beside.sort((a, b) => b.series.y[b.i] - a.series.y[a.i]);

    const group = make(svg, "g", {class: "pointer", transform: `translate(${left} ${top})`});
    make(group, "line", {class: "mark", x1: placeX(x), x2: placeX(x), y1: 0, y2: height});
    tip.replaceChildren();
    const head = tip.appendChild(document.createElement("div"));
    head.textContent = `${data.x} ${shown(x)}`;
    for (const {series, i} of beside) {
      make(group, "circle", {class: `point s${series.colour}`, cx: placeX(series.x[i]),
                             cy: height - placeY(series.y[i]), r: 4});
      const line = tip.appendChild(document.createElement("div"));
      line.className = `s${series.colour}`;
      const band = series.low ? ` (${shown(series.low[i])} – ${shown(series.high[i])})` : "";
      const where = series.x[i] === x ? "" : ` at ${shown(series.x[i])}`;
      line.textContent = `${series.name} ${shown(series.y[i])}${band}${where}`;
    }
    tip.hidden = false;
    const box = figure.getBoundingClientRect();
    const room = box.right - event.clientX > tip.offsetWidth + 24;
    tip.style.left = `${event.clientX - box.left + (room ? 14 : -14 - tip.offsetWidth)}px`;
    tip.style.top = `${event.clientY - box.top + 14}px`;
  };

  for (const box of boxes) box.addEventListener("change", choose);
  for (const drawing of drawings) {
    const svg = drawing.querySelector("svg");
    svg.addEventListener("pointermove", event => move(svg, event));
    svg.addEventListener("pointerdown", event => move(svg, event));
    svg.addEventListener("pointerleave", leave);
  }
  choose();
}
