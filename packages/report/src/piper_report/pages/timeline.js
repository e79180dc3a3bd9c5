"use strict";
// Draws each timeline of the page on canvases: wheel, drag and keys move through time, checkboxes choose bars.
// The data (piper_report.figures.live_timeline) are columns of integers, whose unit of time is `tick` seconds.

const ROW = 18, HEAD = 24, AXIS = 24, RIGHT = 10, TALLEST = 0.75;
const LETTER = 6.5; // pixels of a label's letter: a bar without room for all of it has no label
const HINT = "Wheel: zoom. Drag, or Shift and wheel: move. Double click: all of it. Keys: left, right, +, -, 0.";

function element(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

function timeText(seconds) {
  const size = Math.abs(seconds);
  const [scale, unit] = size >= 1 || size === 0 ? [1, "s"] : size >= 1e-3 ? [1e3, "ms"] : [1e6, "us"];
  return `${Number((seconds * scale).toPrecision(4))} ${unit}`;
}

function sizeText(bytes) {
  const unit = ["B", "KiB", "MiB", "GiB", "TiB"];
  const k = Math.min(4, Math.floor(Math.log2(Math.max(1, bytes)) / 10));
  return `${Number((bytes / 1024 ** k).toPrecision(4))} ${unit[k]}`;
}

// The first index of an ascending array whose value is at least `least`.
function firstAt(ascending, least) {
  let low = 0, high = ascending.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (ascending[middle] < least) low = middle + 1; else high = middle;
  }
  return low;
}

// The colour of a bar, mixed with some white for dark grounds, and that of the letters on it.
function look(colour, white) {
  const [r, g, b] = [1, 3, 5].map(at => parseInt(colour.slice(at, at + 2), 16)).map(p => p + (255 - p) * white);
  return { face: `rgb(${r} ${g} ${b})`, ink: 0.299 * r + 0.587 * g + 0.114 * b > 135 ? "#111" : "#fff" };
}

// Adds starts and ends to a lane; `reach` is the latest end so far, which ascends even where bars overlap.
function decoded(lane) {
  const count = lane.gap.length;
  lane.start = new Float64Array(count);
  lane.end = new Float64Array(count);
  lane.reach = new Float64Array(count);
  let at = 0, reach = 0;
  for (let i = 0; i < count; i++) {
    lane.start[i] = at += lane.gap[i];
    lane.end[i] = at += lane.width[i];
    lane.reach[i] = reach = Math.max(reach, at);
  }
  lane.kinds = [...new Set(lane.what)];
  return lane;
}

class Timeline {
  constructor(box) {
    this.data = JSON.parse(box.querySelector("script").textContent);
    this.view = { from: 0, to: 1 }; // parts of each panel's length
    this.together = false;
    this.hidden = { phases: new Set(), axes: new Set(), ranks: new Set() };
    this.data.ranks.forEach((rank, k) => rank.shown || this.hidden.ranks.add(k));
    for (const panel of this.data.panels) panel.lanes.forEach(decoded);
    this.longest = Math.max(...this.data.panels.map(p => p.length));
    this.tip = element("div", { className: "tip", hidden: true });
    this.panels = this.data.panels.map(panel => this.addPanel(panel));
    box.append(this.controls(), ...this.panels.map(p => p.outer), element("p", { className: "note" }, HINT), this.tip);
    this.choose();
    addEventListener("resize", () => this.choose());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  // --- what is shown

  controls() {
    const { phases, axes, ranks, panels } = this.data;
    return element("div", { className: "filters" },
      this.filter("Kinds", "phases", phases.map(p => [p.name, p.colour])),
      ...(axes.length > 1 ? [this.filter("Communication over", "axes", axes.map(a => [a]))] : []),
      ...(ranks.length > 1 ? [this.filter("Ranks", "ranks", ranks.map(r => [r.name]))] : []),
      ...(panels.length > 1 ? [this.scales()] : []));
  }

  filter(title, key, entries) {
    const boxes = entries.map(([name, colour], k) => {
      const input = element("input", { type: "checkbox", checked: !this.hidden[key].has(k) });
      input.addEventListener("change", () => {
        this.hidden[key][input.checked ? "delete" : "add"](k);
        this.choose();
      });
      const swatch = colour ? [element("i", { style: `background:${colour}` })] : [];
      return [input, element("label", {}, input, ...swatch, name)];
    });
    const all = element("button", { type: "button" }, "all"), none = element("button", { type: "button" }, "none");
    for (const [button, checked] of [[all, true], [none, false]])
      button.addEventListener("click", () => {
        boxes.forEach(([input]) => { input.checked = checked; });
        this.hidden[key] = new Set(checked ? [] : entries.keys());
        this.choose();
      });
    const buttons = entries.length > 2 ? [all, none] : [];
    const list = element("div", { className: "choices" }, ...boxes.map(([, label]) => label));
    return element("fieldset", {}, element("legend", {}, title, ...buttons), list);
  }

  scales() {
    const name = `scale${Math.random()}`; // radio buttons of one name exclude each other
    const choices = [["each on its own", false], ["one for all", true]].map(([text, together]) => {
      const input = element("input", { type: "radio", name, checked: together === this.together });
      input.addEventListener("change", () => { this.together = together; this.draw(); });
      return element("label", {}, input, text);
    });
    const list = element("div", { className: "choices" }, ...choices);
    return element("fieldset", {}, element("legend", {}, "Scale of time"), list);
  }

  isShown(what) {
    return !this.hidden.phases.has(what.phase) && !this.hidden.axes.has(what.axis);
  }

  // Lays out the rows of every panel again, after a filter or the size of the window changed.
  choose() {
    for (const panel of this.panels) {
      panel.rows = [];
      let y = 0, last = -1;
      for (const lane of panel.lanes) {
        if (this.hidden.ranks.has(lane.rank) || !lane.kinds.some(k => this.isShown(this.data.whats[k]))) continue;
        if (lane.rank !== last) {
          panel.rows.push({ y, text: this.data.ranks[lane.rank].name });
          y += HEAD;
          last = lane.rank;
        }
        panel.rows.push({ y, lane });
        y += ROW;
      }
      panel.spacer.style.height = `${y + AXIS + 4}px`;
      panel.height = Math.min(y + AXIS + 4, Math.max(200, TALLEST * innerHeight));
      panel.scroller.style.height = `${panel.height}px`;
    }
    this.draw();
  }

  // --- one panel

  addPanel({ title, length, lanes }) {
    const canvas = element("canvas", { role: "img" });
    const spacer = element("div", { className: "spacer" }, canvas);
    const scroller = element("div", { className: "bars", tabIndex: 0 }, spacer);
    const heading = element("h4", {}, `${title}, ${timeText(length * this.data.tick)}`);
    const outer = element("div", { className: "panel" }, heading, scroller);
    const panel = { title, length, lanes, canvas, spacer, scroller, outer, rows: [], height: 0, drag: null };
    scroller.addEventListener("scroll", () => this.drawPanel(panel));
    scroller.addEventListener("keydown", event => this.key(event));
    canvas.addEventListener("wheel", event => this.wheel(panel, event), { passive: false });
    canvas.addEventListener("dblclick", () => this.show(0, 1));
    canvas.addEventListener("pointerdown", event => {
      if (event.button) return;
      panel.drag = { x: event.clientX, y: event.clientY };
      canvas.setPointerCapture(event.pointerId);
    });
    for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, () => { panel.drag = null; });
    canvas.addEventListener("pointermove", event => this.move(panel, event));
    canvas.addEventListener("pointerleave", () => this.point(panel, null));
    return panel;
  }

  scaleOf(panel) {
    const width = panel.canvas.clientWidth, left = width < 640 ? 116 : 170;
    const length = this.together ? this.longest : panel.length;
    const from = this.view.from * length, to = this.view.to * length;
    const perTick = (width - left - RIGHT) / (to - from);
    return { width, left, from, to, perTick, x: t => left + (t - from) * perTick, t: x => from + (x - left) / perTick };
  }

  // --- moving through time

  show(from, to) {
    const span = Math.min(1, Math.max(1e-7, to - from));
    const start = Math.min(1 - span, Math.max(0, from));
    this.view = { from: start, to: start + span };
    this.draw();
  }

  zoom(factor, at = 0.5) { // `at`: the part of the view that stays where it is
    const { from, to } = this.view, middle = from + at * (to - from);
    this.show(middle - (middle - from) * factor, middle + (to - middle) * factor);
  }

  pan(part) {
    const step = part * (this.view.to - this.view.from);
    this.show(this.view.from + step, this.view.to + step);
  }

  wheel(panel, event) {
    const { left, width } = this.scaleOf(panel), lines = event.deltaMode ? 20 : 1;
    const along = event.shiftKey ? event.deltaX || event.deltaY : event.deltaX;
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      event.preventDefault();
      this.pan((along * lines) / (width - left - RIGHT));
      return;
    }
    if (event.deltaY > 0 && this.view.to - this.view.from === 1 && !event.ctrlKey) return; // the page scrolls on
    event.preventDefault();
    const at = (event.offsetX - left) / (width - left - RIGHT);
    this.zoom(Math.exp(event.deltaY * lines * 0.002), Math.min(1, Math.max(0, at)));
    this.point(panel, event);
  }

  key(event) {
    const act = {
      ArrowLeft: () => this.pan(-0.2), ArrowRight: () => this.pan(0.2), "+": () => this.zoom(0.7),
      "=": () => this.zoom(0.7), "-": () => this.zoom(1 / 0.7), 0: () => this.show(0, 1), Home: () => this.show(0, 1),
      Escape: () => { this.tip.hidden = true; },
    }[event.key];
    if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act();
  }

  move(panel, event) {
    if (!panel.drag) return this.point(panel, event);
    const { left, width } = this.scaleOf(panel);
    panel.scroller.scrollTop += panel.drag.y - event.clientY;
    const moved = (panel.drag.x - event.clientX) / (width - left - RIGHT);
    panel.drag = { x: event.clientX, y: event.clientY };
    this.tip.hidden = true;
    this.pan(moved);
  }

  // --- the box beside the pointer

  point(panel, event) {
    const bar = event && this.barAt(panel, event.offsetX, event.offsetY);
    const changed = (bar?.lane !== panel.marked?.lane) || (bar?.index !== panel.marked?.index);
    panel.marked = bar;
    if (changed) this.drawPanel(panel);
    this.tip.hidden = !bar;
    if (!bar) return;
    if (changed || !this.tip.childNodes.length) this.tip.replaceChildren(...this.facts(bar));
    const { offsetWidth: w, offsetHeight: h } = this.tip;
    const most = document.documentElement.clientWidth - w - 4;
    this.tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, most))}px`;
    this.tip.style.top = `${event.clientY + 18 + h > innerHeight ? event.clientY - h - 10 : event.clientY + 18}px`;
  }

  // The bar below a point of the canvas, or the nearest within three pixels.
  barAt(panel, x, y) {
    const scale = this.scaleOf(panel), at = y - AXIS + panel.scroller.scrollTop;
    const row = panel.rows.find(r => r.lane && r.y <= at && at < r.y + ROW);
    if (!row || x < scale.left || y < AXIS) return null;
    const { lane } = row, t = scale.t(x), near = 3 / scale.perTick;
    let nearest = null, distance = near;
    for (let i = firstAt(lane.reach, t - near); i < lane.start.length && lane.start[i] <= t + near; i++) {
      const away = Math.max(lane.start[i] - t, t - lane.end[i], 0);
      if (away <= distance && this.isShown(this.data.whats[lane.what[i]])) {
        nearest = { lane, index: i };
        distance = away;
      }
    }
    return nearest;
  }

  facts({ lane, index }) {
    const what = this.data.whats[lane.what[index]], tick = this.data.tick, mb = lane.mb[index];
    const start = lane.start[index] * tick, seconds = lane.width[index] * tick, waited = lane.wait?.[index] * tick;
    const rows = [
      ["kind", this.data.phases[what.phase].name + (what.again ? ", after recomputation" : "")],
      mb >= 0 && ["microbatch", mb],
      ["rank", this.data.ranks[lane.rank].name], ["stream", lane.stream],
      what.axis >= 0 && ["over", this.data.axes[what.axis]],
      ["start", timeText(start)], ["duration", timeText(seconds)],
      waited && ["of it waiting", timeText(waited)],
      what.bytes && ["moves", sizeText(what.bytes)],
      what.flops && ["computes", `${(what.flops / 1e12).toPrecision(4)} TFLOP`],
      ["duration is", what.source],
    ].filter(Boolean);
    const list = rows.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, String(value))]);
    return [element("strong", {}, this.filled(what.name, mb)), element("dl", {}, ...list)];
  }

  filled(text, mb) { return text.replaceAll(this.data.mark, mb); } // the mark stands for any microbatch

  // --- drawing

  draw() { this.panels.forEach(panel => this.drawPanel(panel)); }

  drawPanel(panel) {
    const canvas = panel.canvas, scale = this.scaleOf(panel), { width, left } = scale, height = panel.height;
    if (!width) return;
    const dots = devicePixelRatio || 1, style = getComputedStyle(canvas);
    const colour = name => style.getPropertyValue(name).trim();
    const dark = matchMedia("(prefers-color-scheme: dark)").matches;
    canvas.width = Math.round(width * dots);
    canvas.height = Math.round(height * dots);
    canvas.style.height = `${height}px`;
    const pen = canvas.getContext("2d");
    pen.setTransform(dots, 0, 0, dots, 0, 0);
    pen.font = `12px ${style.fontFamily}`;
    pen.textBaseline = "middle";
    this.looks = this.data.phases.map(p => look(p.colour, dark ? 0.25 : 0));
    const paint = { ink: colour("--ink"), soft: colour("--soft"), line: colour("--line"), ground: colour("--ground") };
    this.drawAxis(pen, scale, height, paint);
    pen.save();
    pen.beginPath();
    pen.rect(0, AXIS, width, height - AXIS);
    pen.clip();
    const top = panel.scroller.scrollTop;
    let bars = 0, rows = 0;
    for (const row of panel.rows) {
      const y = row.y - top + AXIS;
      if (row.lane) rows += 1;
      if (y > height || y + HEAD < AXIS) continue;
      if (row.lane) bars += this.drawLane(pen, scale, row.lane, y, paint, panel.marked);
      else this.drawWord(pen, row.text, 4, y + HEAD / 2 + 2, width - 8, paint.ink, "bold ");
    }
    if (!panel.rows.length) this.drawWord(pen, "nothing chosen", left, AXIS + 12, width, paint.soft);
    pen.restore();
    const times = [scale.from, scale.to].map(t => timeText(t * this.data.tick)).join(" to ");
    canvas.setAttribute("aria-label", `${panel.title}: ${rows} rows from ${times}, ${bars} bars drawn`);
  }

  drawAxis(pen, scale, height, paint) {
    const most = Math.max(2, Math.floor((scale.width - scale.left) / 90));
    const rough = ((scale.to - scale.from) * this.data.tick) / most, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].find(k => k * power >= rough) * power;
    const last = scale.to * this.data.tick;
    const [by, unit] = last >= 1 ? [1, "s"] : last >= 1e-3 ? [1e3, "ms"] : [1e6, "us"];
    const digits = Math.max(0, -Math.floor(Math.log10(step * by) + 1e-9));
    pen.textAlign = "center";
    for (let k = Math.ceil((scale.from * this.data.tick) / step); k * step <= last * (1 + 1e-12); k++) {
      const x = scale.x((k * step) / this.data.tick);
      pen.fillStyle = paint.line;
      pen.fillRect(Math.round(x), AXIS - 4, 1, height);
      pen.fillStyle = paint.soft;
      if (x < scale.width - 24) pen.fillText((k * step * by).toFixed(digits), x, AXIS / 2 - 1);
    }
    this.drawWord(pen, scale.left < 150 ? unit : `time in ${unit}`, 4, AXIS / 2 - 1, scale.left - 30, paint.soft);
  }

  drawLane(pen, scale, lane, y, paint, marked) {
    this.drawWord(pen, lane.stream, 12, y + ROW / 2, scale.left - 18, paint.soft);
    pen.save();
    pen.beginPath();
    pen.rect(scale.left, y, scale.width - scale.left, ROW);
    pen.clip();
    pen.textAlign = "center";
    let reached = -1, drawn = 0;
    for (let i = firstAt(lane.reach, scale.from); i < lane.start.length && lane.start[i] <= scale.to; i++) {
      const what = this.data.whats[lane.what[i]];
      if (!this.isShown(what)) continue;
      const begin = Math.max(scale.x(lane.start[i]), scale.left - 2);
      const end = Math.min(scale.x(lane.end[i]), scale.width + 2);
      if (end - begin < 0.5 && end < reached + 0.5) continue; // half a pixel has one bar
      reached = end;
      drawn += 1;
      const moving = lane.wait ? Math.max(begin, scale.x(lane.start[i] + lane.wait[i])) : begin;
      if (moving - begin > 1) {
        pen.strokeStyle = paint.soft;
        pen.strokeRect(begin + 0.5, y + 3.5, moving - begin - 1, ROW - 7);
      }
      const { face, ink } = this.looks[what.phase], wide = end - moving > 4 ? 1 : 0; // a gap, where there is room
      pen.fillStyle = face;
      pen.fillRect(moving, y + 2, Math.max(end - moving - wide, 1), ROW - 4);
      if (what.again && wide) {
        pen.fillStyle = ink;
        pen.fillRect(moving, y + ROW - 5, end - moving - wide, 1);
      }
      const label = this.filled(what.label, lane.mb[i]);
      if (label && end - moving > LETTER * label.length + 4) {
        pen.fillStyle = ink;
        pen.fillText(label, (Math.max(moving, scale.left) + Math.min(end, scale.width)) / 2, y + ROW / 2 + 0.5);
      }
      if (marked?.lane === lane && marked.index === i) {
        pen.strokeStyle = paint.ink;
        pen.lineWidth = 2;
        pen.strokeRect(begin, y + 1.5, Math.max(end - begin - wide, 1), ROW - 3);
        pen.lineWidth = 1;
      }
    }
    pen.restore();
    return drawn;
  }

  drawWord(pen, text, x, y, room, ink, weight = "") {
    const font = pen.font;
    pen.font = weight + font;
    pen.textAlign = "left";
    pen.fillStyle = ink;
    let shown = text;
    while (shown.length > 1 && pen.measureText(shown).width > room) shown = `${shown.slice(0, -2)}…`;
    pen.fillText(shown, x, y);
    pen.font = font;
  }
}

document.querySelectorAll(".timeline").forEach(box => new Timeline(box));
