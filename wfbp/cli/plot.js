// Draws figures as SVG. A figure is data in Plotly's form, of which this knows bars, lines and
// points on linear, logarithmic and category axes: what the modules of wfbp.cli.figures make.
"use strict";

const Plot = (() => {
  const NS = "http://www.w3.org/2000/svg";
  const NARROW = 620; // below, the names of rows stand above their bars
  const ROW = 34;
  const LABEL = 16; // height of a row's name where it stands above
  const DASHES = { solid: "", dash: "7 4", dot: "2 3" };
  let clips = 0;

  function node(parent, name, attributes, text) {
    const made = document.createElementNS(NS, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    parent.appendChild(made);
    return made;
  }

  function plain(text) { // names come with entities and <br>
    const area = document.createElement("textarea");
    area.innerHTML = text.replaceAll("<br>", "\n");
    return area.value;
  }

  function number(value, format) {
    const [, comma, digits, kind] = /^(,?)\.(\d+)([f%])$/.exec(format) || [];
    if (kind === undefined) return String(value);
    const options = { minimumFractionDigits: +digits, maximumFractionDigits: +digits };
    options.useGrouping = comma === ",";
    const scaled = kind === "%" ? value * 100 : value;
    return scaled.toLocaleString("en-US", options) + (kind === "%" ? "%" : "");
  }

  // %{y:.1%} and the like, for one point of a series.
  function hover(series, index) {
    const values = { name: series.name };
    for (const key of ["x", "y", "text", "customdata"]) {
      if (series[key] !== undefined) values[key] = series[key][index];
    }
    const template = (series.hovertemplate || "%{x}, %{y}").replace(/<extra>.*<\/extra>/, "");
    const told = template.replace(/%\{(\w+)(?:\[(\d+)\])?(?::([^}]+))?\}/g, (_, key, at, format) => {
      const value = at === undefined ? values[key] : values[key][+at];
      return format && typeof value === "number" ? number(value, format) : value;
    });
    const named = series.hovertemplate && series.hovertemplate.includes("<extra>");
    return plain(named ? told : `${series.name}: ${told}`);
  }

  function niceTicks(low, high, count) {
    const rough = (high - low) / Math.max(1, count);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((k) => k * power).find((k) => k >= rough);
    const ticks = [];
    for (let k = Math.ceil(low / step - 1e-9); k * step <= high * (1 + 1e-9) + 1e-12; k += 1) {
      ticks.push(k * step || 0); // no -0
    }
    const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    return ticks.map((value) => [value, number(value, `,.${digits}f`)]);
  }

  function logTicks(low, high, count, si) {
    const first = Math.ceil(Math.log10(low) - 1e-9);
    const last = Math.floor(Math.log10(high) + 1e-9);
    const step = Math.max(1, Math.ceil((last - first + 1) / count));
    const ticks = [];
    for (let power = first; power <= last; power += step) {
      const value = 10 ** power;
      const thousands = Math.floor(power / 3);
      const text = si && thousands > 0
        ? `${10 ** (power - 3 * thousands)}${"kMGT"[thousands - 1]}`
        : String(+value.toPrecision(3));
      ticks.push([value, text]);
    }
    return ticks;
  }

  function categoriesOf(axis, data, key) {
    if (axis.categoryarray) return axis.categoryarray;
    const all = data.flatMap((series) => series[key] || []).filter((v) => typeof v === "string");
    return all.length ? [...new Set(all)] : null;
  }

  // The numbers that an axis has to show.
  function extent(axis, data, key, layout) {
    const stacks = {};
    const values = [];
    for (const series of data) {
      const along = series.type === "bar" && (series.orientation === "h") === (key === "x");
      (series[key] || []).forEach((value, index) => {
        if (typeof value !== "number") return;
        const other = (series[key === "x" ? "y" : "x"] || [])[index];
        let end = value;
        if (along && series.base) {
          values.push(series.base[index]);
          end += series.base[index];
        } else if (along && layout.barmode === "stack") {
          end = stacks[other] = (stacks[other] || 0) + value;
        }
        values.push(end);
      });
    }
    for (const shape of layout.shapes || []) if (key === "x") values.push(shape.x0);
    const seen = values.filter((value) => axis.type !== "log" || value > 0);
    let low = Math.min(...seen);
    let high = Math.max(...seen);
    if (!seen.length) [low, high] = [1, 2];
    if (axis.type === "log") return [low / 1.15, high * 1.15];
    if (axis.rangemode === "tozero") low = Math.min(0, low);
    if (high <= low) high = low + 1;
    return [low, high + 0.03 * (high - low)];
  }

  function scale(axis, range, from, to) {
    const change = axis.type === "log" ? Math.log : (value) => value;
    const [low, high] = range.map(change);
    const place = (value) => from + ((change(value) - low) / (high - low)) * (to - from);
    const back = (at) => {
      const value = low + ((at - from) / (to - from)) * (high - low);
      return axis.type === "log" ? Math.exp(value) : value;
    };
    return { place, back };
  }

  function ticksOf(axis, range, count) {
    if (axis.type === "log") return logTicks(...range, count, axis.exponentformat === "SI");
    return niceTicks(...range, count);
  }

  const SYMBOLS = {
    circle: (r) => `M${-r},0a${r},${r} 0 1,0 ${2 * r},0a${r},${r} 0 1,0 ${-2 * r},0`,
    square: (r) => `M${-r},${-r}h${2 * r}v${2 * r}h${-2 * r}z`,
    diamond: (r) => `M0,${-1.3 * r}L${1.3 * r},0L0,${1.3 * r}L${-1.3 * r},0z`,
    "triangle-up": (r) => `M0,${-1.2 * r}L${1.2 * r},${r}L${-1.2 * r},${r}z`,
    "triangle-down": (r) => `M0,${1.2 * r}L${1.2 * r},${-r}L${-1.2 * r},${-r}z`,
    x: (r) => `M${-r},${-r}L${r},${r}M${-r},${r}L${r},${-r}`,
    cross: (r) => `M0,${-1.2 * r}V${1.2 * r}M${-1.2 * r},0H${1.2 * r}`,
    "line-ns": (r) => `M0,${-r}V${r}`,
  };

  function drawPoint(parent, x, y, marker, color) {
    const symbol = marker.symbol || "circle";
    const isLine = ["x", "cross", "line-ns"].includes(symbol);
    const stroke = (marker.line && marker.line.color) || color;
    return node(parent, "path", {
      d: SYMBOLS[symbol]((marker.size || 7) / 2),
      transform: `translate(${x},${y})`,
      fill: isLine ? "none" : color,
      stroke: isLine ? stroke : "none",
      "stroke-width": (marker.line && marker.line.width) || 2,
    });
  }

  // Legend and picture; state holds what the reader has chosen.
  function draw(element, figure, paint) {
    const state = element.plotState || (element.plotState = { hidden: new Set(), range: null });
    state.figure = figure;
    state.paint = paint;
    element.replaceChildren();
    const { data, layout } = figure;
    const shown = (index) => !state.hidden.has(index);
    const redraw = () => draw(element, figure, state.paint);
    drawLegend(element, data, shown, state, paint, redraw);
    const visible = data.filter((_, index) => shown(index));
    drawPicture(element, visible, layout, state, paint, redraw);
  }

  function drawLegend(element, data, shown, state, paint, redraw) {
    const legend = element.appendChild(document.createElement("div"));
    legend.className = "legend";
    data.forEach((series, index) => {
      const entry = legend.appendChild(document.createElement("button"));
      entry.type = "button";
      entry.setAttribute("aria-pressed", shown(index));
      const sample = node(entry, "svg", { width: 26, height: 12, "aria-hidden": "true" });
      const line = series.line || {};
      const marker = series.marker || {};
      const color = paint(line.color || marker.color || (marker.line && marker.line.color));
      if (series.type === "bar") {
        node(sample, "rect", { x: 5, y: 1, width: 16, height: 10, rx: 2, fill: color });
      } else {
        if (series.mode.includes("lines")) {
          node(sample, "path", {
            d: "M1,6H25", stroke: color, "stroke-width": line.width || 2,
            "stroke-dasharray": DASHES[line.dash || "solid"],
          });
        }
        if (series.mode.includes("markers")) drawPoint(sample, 13, 6, painted(marker, paint), color);
      }
      entry.appendChild(document.createElement("span")).textContent = plain(series.name);
      entry.addEventListener("click", () => {
        if (state.hidden.has(index)) state.hidden.delete(index);
        else state.hidden.add(index);
        redraw();
      });
    });
  }

  function painted(marker, paint) {
    if (!marker.line) return marker;
    return { ...marker, line: { ...marker.line, color: paint(marker.line.color) } };
  }

  function drawPicture(element, data, layout, state, paint, redraw) {
    const width = Math.max(240, element.clientWidth);
    const narrow = width < NARROW;
    const { xaxis, yaxis } = layout;
    const rows = categoriesOf(yaxis, data, "y");
    const above = narrow && rows ? LABEL : 0;
    const longest = rows ? Math.max(...rows.map((row) => plain(row).length)) : 0;
    const left = rows ? (narrow ? 8 : Math.min(0.4 * width, 16 + 7.4 * longest)) : narrow ? 56 : 66;
    const top = 8;
    const bottom = 44;
    const right = narrow ? 12 : 24;
    const inner = rows ? rows.length * (ROW + above) : narrow ? 260 : 330;
    const height = top + inner + bottom;
    const svg = node(element, "svg", { width, height, role: "img", class: "picture" });
    const clip = `clip${(clips += 1)}`;
    const box = { x: left, y: top, width: width - left - right, height: inner };
    node(node(svg, "clipPath", { id: clip }), "rect", box);

    const xRange = state.range || extent(xaxis, data, "x", layout);
    const x = scale(xaxis, xRange, left, width - right);
    const yRange = rows ? null : extent(yaxis, data, "y", layout);
    const y = rows ? null : scale(yaxis, yRange, top + inner, top);
    const rowAt = (name) => top + (rows.length - 1 - rows.indexOf(name)) * (ROW + above) + above;
    const xAt = (value) => x.place(value);
    const yAt = (value) => (rows ? rowAt(value) + ROW / 2 : y.place(value));

    const text = { fill: paint("@soft"), "font-size": 12 };
    const grid = { stroke: paint("@grid"), "stroke-width": 1 };
    for (const [value, label] of ticksOf(xaxis, xRange, narrow ? 4 : 9)) {
      const at = x.place(value);
      node(svg, "path", { d: `M${at},${top}v${inner}`, ...grid });
      node(svg, "text", { x: at, y: top + inner + 16, "text-anchor": "middle", ...text }, label);
    }
    if (y) {
      for (const [value, label] of ticksOf(yaxis, yRange, 6)) {
        const at = y.place(value);
        node(svg, "path", { d: `M${left},${at}H${width - right}`, ...grid });
        node(svg, "text", { x: left - 6, y: at + 4, "text-anchor": "end", ...text }, label);
      }
    } else {
      for (const name of rows) {
        const place = narrow
          ? { x: left, y: rowAt(name) - 3, "text-anchor": "start" }
          : { x: left - 8, y: rowAt(name) + ROW / 2 + 4, "text-anchor": "end" };
        node(svg, "text", { ...place, ...text, fill: paint("@ink") }, plain(name));
      }
    }
    const title = (axis, place) => {
      if (axis.title) node(svg, "text", { ...text, ...place, "text-anchor": "middle" }, axis.title.text);
    };
    title(xaxis, { x: left + box.width / 2, y: height - 8 });
    title(yaxis, { transform: `translate(12,${top + inner / 2}) rotate(-90)` });

    const marks = node(svg, "g", { "clip-path": `url(#${clip})` });
    const stacks = {};
    data.forEach((series) => {
      const line = series.line || {};
      const marker = painted(series.marker || {}, paint);
      const color = paint(line.color || marker.color || "@ink");
      if (series.type === "bar") {
        series.x.forEach((value, index) => {
          const name = series.y[index];
          const start = series.base ? series.base[index] : stacks[name] || 0;
          if (!series.base) stacks[name] = start + value;
          const thick = ROW * 0.8 * (series.width ? series.width / 0.8 : 1);
          const from = x.place(start);
          const shape = {
            x: from, y: rowAt(name) + (ROW - thick) / 2,
            width: Math.max(0.5, x.place(start + value) - from), height: thick,
          };
          const edge = { stroke: paint("@paper"), "stroke-width": shape.width > 3 ? 0.8 : 0 };
          const made = node(marks, "rect", { ...shape, ...edge, fill: color });
          made.dataset.hover = hover(series, index);
        });
        return;
      }
      const points = series.x
        .map((value, index) => [value, series.y[index], index])
        .filter(([value, other]) => value !== null && other !== null);
      if (series.mode.includes("lines") && points.length) {
        node(marks, "path", {
          d: points.map(([v, w], k) => `${k ? "L" : "M"}${xAt(v)},${yAt(w)}`).join(""),
          fill: "none", stroke: color, "stroke-width": line.width || 2,
          "stroke-dasharray": DASHES[line.dash || "solid"],
        });
      }
      for (const [value, other, index] of points) {
        if (series.mode.includes("markers")) {
          drawPoint(marks, xAt(value), yAt(other), marker, color);
        }
        if (series.mode.includes("markers") || points.length < 80) {
          const spot = { cx: xAt(value), cy: yAt(other), r: 7, fill: "transparent" };
          node(marks, "circle", spot).dataset.hover = hover(series, index);
        }
      }
    });
    for (const shape of layout.shapes || []) {
      node(marks, "path", {
        d: `M${x.place(shape.x0)},${top}v${inner}`, stroke: paint(shape.line.color),
        "stroke-width": shape.line.width, "stroke-dasharray": DASHES[shape.line.dash],
      });
    }
    listen(element, svg, state, x, box, redraw);
  }

  // A label beside the pointer; dragging along x zooms, a double click shows all again.
  function listen(element, svg, state, x, box, redraw) {
    const tip = element.appendChild(document.createElement("div"));
    tip.className = "tip";
    tip.hidden = true;
    let from = null;
    let frame = null;
    svg.addEventListener("pointermove", (event) => {
      const told = event.target.dataset.hover;
      tip.hidden = !told || from !== null;
      if (told) {
        tip.textContent = told;
        const area = element.getBoundingClientRect();
        const wide = tip.offsetWidth;
        const at = Math.min(event.clientX - area.left + 14, area.width - wide - 4);
        tip.style.left = `${Math.max(0, at)}px`;
        tip.style.top = `${event.clientY - area.top + 16}px`;
      }
      if (from !== null) {
        const at = event.clientX - svg.getBoundingClientRect().left;
        frame.setAttribute("x", Math.min(from, at));
        frame.setAttribute("width", Math.abs(at - from));
      }
    });
    svg.addEventListener("pointerleave", () => { tip.hidden = true; });
    if (!x) return;
    svg.addEventListener("pointerdown", (event) => {
      if (event.pointerType === "touch") return; // a finger scrolls
      from = event.clientX - svg.getBoundingClientRect().left;
      frame = node(svg, "rect", { y: box.y, height: box.height, width: 0, class: "frame" });
      svg.setPointerCapture(event.pointerId);
    });
    svg.addEventListener("pointerup", (event) => {
      if (from === null) return;
      const ends = [from, event.clientX - svg.getBoundingClientRect().left].sort((a, b) => a - b);
      from = null;
      frame.remove();
      if (ends[1] - ends[0] < 8) return;
      state.range = ends.map((at) => x.back(Math.min(Math.max(at, box.x), box.x + box.width)));
      redraw();
    });
    svg.addEventListener("dblclick", () => {
      state.range = null;
      redraw();
    });
  }

  return { draw };
})();
