"use strict";
// Draws the charts of a page as SVG: lines or points, axes that may be logarithmic, a legend that hides and shows
// series, and the values under the pointer. A page puts each chart's data, as JSON, into <figure class="chart">.

const SVG = "http://www.w3.org/2000/svg";
const MARGIN = {top: 24, right: 14, bottom: 38, left: 58};
const HEIGHT = 270;
const DASHES = ["", "7 3", "2 3", "9 3 2 3"];  // with the colors: legible without telling colors apart
const SHAPES = [  // of points, around the origin
  "M-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0", "M-4,-4h8v8h-8z", "M0,-5l5,9h-10z", "M0,-5l5,5l-5,5l-5,-5z",
];
const NUMBER = new Intl.NumberFormat("en", {maximumSignificantDigits: 4});

function element(tag, attributes, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** A number for a person: 12,345 or 0.01234, and 1.2e-5 where that is shorter. */
function words(value) {
  if (!Number.isFinite(value)) return String(value);
  if (value === 0) return "0";  // also for -0
  const size = Math.abs(value);
  return size && (size < 1e-3 || size >= 1e7) ? value.toExponential(1).replace("e+", "e") : NUMBER.format(value);
}

/** Round values between two numbers, about `count` of them, at least `apart` from each other. */
function linearTicks(low, high, count, apart) {
  const raw = Math.max(apart, (high - low) / count);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= raw);
  const ticks = [];
  for (let index = Math.ceil(low / step - 1e-9); index * step <= high + step * 1e-9; index++) ticks.push(index * step);
  return ticks;
}

function logTicks(low, high, count) {
  const powers = [];
  for (let power = Math.floor(low); power <= Math.ceil(high); power++) powers.push(power);
  const every = Math.max(1, Math.ceil(powers.length / (count + 2)));
  let ticks = [];
  for (const factors of [[1], [1, 3], [1, 2, 5], [1, 1.5, 2, 3, 4, 5, 6, 8]]) {
    ticks = powers.filter((power) => power % every === 0)
      .flatMap((power) => factors.map((factor) => Math.log10(factor * 10 ** power)))
      .filter((tick) => tick >= low - 1e-9 && tick <= high + 1e-9);
    if (ticks.length >= 3) break;
  }
  return ticks;
}

/** An axis over the values: where a value lies from 0 to 1, and its ticks. */
function makeAxis(values, isLog, count) {
  const scale = isLog ? Math.log10 : (value) => value;
  const known = values.filter((value) => Number.isFinite(value) && (!isLog || value > 0)).map(scale);
  let low = Math.min(...known), high = Math.max(...known);
  if (!known.length) [low, high] = [0, 1];
  if (low === high) [low, high] = [low - (Math.abs(low) || 1) * .1, high + (Math.abs(high) || 1) * .1];
  const pad = (high - low) * .03;
  [low, high] = [low - pad, high + pad];
  const ticks = isLog ? logTicks(low, high, count) : linearTicks(low, high, count, known.every(Number.isInteger) ? 1 : 0);
  return {
    at: (value) => (value === null || (isLog && value <= 0) ? NaN : (scale(value) - low) / (high - low)),
    ticks: ticks.map((tick) => ({at: (tick - low) / (high - low), text: words(isLog ? 10 ** tick : tick)})),
  };
}

/** As much of a text as fits into the width, in pixels. */
function cut(text, width) {
  const room = Math.max(3, Math.floor(width / 7));  // letters
  return text.length > room ? `${text.slice(0, room - 1)}…` : text;
}

/** An axis over names, each in the middle of its own place. */
function namedAxis(names, width) {
  const at = (place) => (place + .5) / names.length;
  return {at, ticks: names.map((name, place) => ({at: at(place), text: cut(name, width / names.length)}))};
}

class Chart {
  constructor(figure, data) {
    this.figure = figure;
    this.hidden = new Set();
    this.holder = document.createElement("div");
    this.tip = Object.assign(document.createElement("div"), {className: "tip", hidden: true});
    this.legend = Object.assign(document.createElement("div"), {className: "legend"});
    figure.append(this.holder, this.tip, this.legend);
    this.data = data;
    this.drawLegend();
    this.draw();
    new ResizeObserver(() => this.draw()).observe(figure);
  }

  get shown() {
    return this.data.series.map((series, index) => ({...series, index})).filter((each) => !this.hidden.has(each.name));
  }

  draw() {
    const width = Math.max(this.figure.clientWidth, 240);
    const inner = {width: width - MARGIN.left - MARGIN.right, height: HEIGHT - MARGIN.top - MARGIN.bottom};
    const shown = this.shown;
    const names = this.data.x_names;
    const x = names.length ? namedAxis(names, inner.width)
      : makeAxis(shown.flatMap((each) => each.x), this.data.log_x, Math.max(2, Math.floor(inner.width / 90)));
    const y = makeAxis(shown.flatMap((each) => each.y), this.data.log_y, 5);
    this.place = {
      x: (value) => MARGIN.left + x.at(value) * inner.width,
      y: (value) => MARGIN.top + (1 - y.at(value)) * inner.height,
    };
    const curves = this.data.series.map((each) => each.name).join(", ");
    const svg = element("svg", {viewBox: `0 0 ${width} ${HEIGHT}`, height: HEIGHT, role: "img",
      "aria-label": `${this.data.title}: ${curves} by ${this.data.x_label}`});
    svg.append(...this.axes(x, y, inner), ...shown.map((each) => this.series(each)));
    this.cursor = element("line", {class: "cursor", y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom, visibility: "hidden"});
    svg.append(this.cursor);
    svg.addEventListener("pointermove", (event) => this.point(event));
    svg.addEventListener("pointerleave", () => this.leave());
    this.holder.replaceChildren(svg);
    this.leave();
  }

  axes(x, y, inner) {
    const bottom = HEIGHT - MARGIN.bottom;
    const parts = [];
    for (const tick of y.ticks) {
      const at = MARGIN.top + (1 - tick.at) * inner.height;
      parts.push(element("line", {class: "grid", x1: MARGIN.left, x2: MARGIN.left + inner.width, y1: at, y2: at}));
      parts.push(element("text", {x: MARGIN.left - 7, y: at + 4, "text-anchor": "end"}, tick.text));
    }
    for (const tick of x.ticks) {
      const at = MARGIN.left + tick.at * inner.width;
      parts.push(element("line", {class: "axis", x1: at, x2: at, y1: bottom, y2: bottom + 4}));
      parts.push(element("text", {x: at, y: bottom + 17, "text-anchor": "middle"}, tick.text));
    }
    parts.push(element("line", {class: "axis", x1: MARGIN.left, x2: MARGIN.left + inner.width, y1: bottom, y2: bottom}));
    const middle = MARGIN.left + inner.width / 2;
    parts.push(element("text", {x: middle, y: HEIGHT - 3, "text-anchor": "middle"}, cut(this.data.x_label, inner.width)));
    parts.push(element("text", {x: 0, y: 12}, cut(this.data.y_label, inner.width)));
    return parts;
  }

  series({index: place, x, y, kind}) {
    const index = shade(place, kind);
    const color = `var(--series-${index % 8})`;
    const points = x.map((value, at) => [this.place.x(value), this.place.y(y[at])]);
    const known = points.filter(([left, top]) => Number.isFinite(left) && Number.isFinite(top));
    const group = element("g", {});
    const isFaint = kind === "faint";
    if (kind !== "points") {
      let path = "", pen = "M";
      for (const [left, top] of points) {
        const isKnown = Number.isFinite(left) && Number.isFinite(top);
        if (isKnown) path += `${pen}${left.toFixed(1)},${top.toFixed(1)}`;
        pen = isKnown ? "L" : "M";
      }
      group.append(element("path", {class: isFaint ? "curve faint" : "curve", d: path, stroke: color,
        "stroke-dasharray": dash(index)}));
    }
    if (!["line", "faint"].includes(kind) || known.length === 1) {
      for (const [left, top] of known) group.append(marker(index, left, top));
    }
    return group;
  }

  /** Show the values that lie nearest to the pointer. */
  point(event) {
    const frame = this.holder.getBoundingClientRect();
    const [left, top] = [event.clientX - frame.left, event.clientY - frame.top];
    const lines = this.data.labels_points ? this.nearestPoint(left, top) : this.nearestColumn(left);
    if (!lines) return this.leave();
    this.tip.textContent = lines.text;
    this.tip.hidden = false;
    this.cursor.setAttribute("x1", lines.at);
    this.cursor.setAttribute("x2", lines.at);
    this.cursor.setAttribute("visibility", this.data.labels_points ? "hidden" : "visible");
    const width = this.tip.offsetWidth;
    const side = lines.at + 14 + width > frame.width ? lines.at - 14 - width : lines.at + 14;
    this.tip.style.left = `${Math.max(0, side)}px`;
    this.tip.style.top = `${this.holder.offsetTop + Math.min(Math.max(top - 20, 0), HEIGHT - 90)}px`;
  }

  nearestColumn(left) {
    let value = null, distance = Infinity;
    for (const series of this.shown) {
      for (const each of series.x) {
        const away = Math.abs(this.place.x(each) - left);
        if (away < distance) [value, distance] = [each, away];
      }
    }
    if (value === null) return null;
    const found = this.shown.map((series) => [series.name, closest(series, value, this.place)])
      .filter(([, y]) => y !== null);
    const text = [`${this.data.x_label} ${words(value)}`, ...found.map(([name, y]) => `${name}  ${words(y)}`)].join("\n");
    return {at: this.place.x(value), text};
  }

  nearestPoint(left, top) {
    let best = null, distance = 30;
    for (const series of this.shown) {
      series.x.forEach((value, at) => {
        const away = Math.hypot(this.place.x(value) - left, this.place.y(series.y[at]) - top);
        if (away < distance) [best, distance] = [{series, at}, away];
      });
    }
    if (!best) return null;
    const {series, at} = best;
    const lines = [series.labels?.[at] ?? series.name, `${this.data.x_label} ${this.data.x_names[series.x[at]] ?? words(series.x[at])}`,
      `${this.data.y_label} ${words(series.y[at])}`];
    return {at: this.place.x(series.x[at]), text: lines.join("\n")};
  }

  leave() {
    this.tip.hidden = true;
    this.cursor.setAttribute("visibility", "hidden");
  }

  drawLegend() {
    this.legend.hidden = this.data.series.length < 2;
    this.legend.replaceChildren(...this.data.series.map((series, place) => {
      const index = shade(place, series.kind);
      const button = Object.assign(document.createElement("button"), {type: "button"});
      const sample = element("svg", {viewBox: "0 0 24 12", "aria-hidden": "true"});
      if (series.kind !== "points") {
        sample.append(element("path", {d: "M0,6H24", class: `curve ${series.kind}`, stroke: `var(--series-${index % 8})`,
          "stroke-dasharray": dash(index)}));
      }
      if (!["line", "faint"].includes(series.kind)) sample.append(marker(index, 12, 6));
      button.append(sample, series.name);
      button.setAttribute("aria-pressed", String(!this.hidden.has(series.name)));
      button.addEventListener("click", () => {
        if (!this.hidden.delete(series.name)) this.hidden.add(series.name);
        button.setAttribute("aria-pressed", String(!this.hidden.has(series.name)));
        this.draw();
      });
      return button;
    }));
  }
}

/** The value of a series at the place nearest to `value`; null if none lies close by. */
function closest(series, value, place) {
  let found = null, distance = 12;
  series.x.forEach((each, at) => {
    const away = Math.abs(place.x(each) - place.x(value));
    if (away < distance && series.y[at] !== null) [found, distance] = [series.y[at], away];
  });
  return found;
}

/** The number of a series' color: a faint one has that of the series before it. */
function shade(index, kind) {
  return kind === "faint" ? Math.max(0, index - 1) : index;
}

function dash(index) {
  return DASHES[Math.floor(index / 2) % DASHES.length];
}

function marker(index, left, top) {
  return element("path", {d: SHAPES[index % SHAPES.length], transform: `translate(${left.toFixed(1)} ${top.toFixed(1)})`,
    fill: `var(--series-${index % 8})`, "fill-opacity": ".8"});
}

for (const figure of document.querySelectorAll("figure.chart")) {
  new Chart(figure, JSON.parse(figure.querySelector("script").textContent));
}
