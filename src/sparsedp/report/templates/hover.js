"use strict";
// Shows the values under the pointer, or under the arrow keys. Names are set as text, never as HTML.
for (const plot of document.querySelectorAll(".plot")) {
  const data = JSON.parse(plot.querySelector(".data").textContent);
  const area = plot.querySelector(".area"), cursor = plot.querySelector(".cursor"), tip = plot.querySelector(".tip");
  const [first, last] = data.x;
  const all = [...new Set(data.series.flatMap((series) => series.x))].sort((a, b) => a - b);
  let at = -1;  // in `all`

  const nearest = (values, x) => {
    let low = 0, high = values.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (values[middle] < x) low = middle + 1; else high = middle;
    }
    return low > 0 && x - values[low - 1] < values[low] - x ? low - 1 : low;
  };
  const words = (value) => {
    if (value === null || value === undefined) return "no number";
    const size = Math.abs(value);
    if (Number.isInteger(value) || (size >= 1000 && size < 1e15)) return Math.round(value).toLocaleString("en");
    return size >= 1e15 || (size > 0 && size < 1e-4) ? value.toExponential(3) : String(Number(value.toPrecision(5)));
  };
  const show = (index) => {
    at = Math.max(0, Math.min(all.length - 1, index));
    const x = all[at], share = (x - first) / (last - first);
    const lines = [document.createElement("b")];
    lines[0].textContent = `${data.label} ${words(Math.round(x))}`;
    for (const series of data.series) {
      const line = document.createElement("div"), key = document.createElement("i");
      key.className = `key c${series.color}`;
      line.append(key, `${series.name}: ${words(series.y[nearest(series.x, x)])}`);
      lines.push(line);
    }
    tip.replaceChildren(...lines);
    cursor.hidden = tip.hidden = false;
    cursor.style.left = `${100 * share}%`;
    const room = area.clientWidth, wanted = share * room + 12;
    tip.style.left = `${Math.max(0, wanted + tip.offsetWidth > room ? share * room - tip.offsetWidth - 12 : wanted)}px`;
  };
  const hide = () => { cursor.hidden = tip.hidden = true; };
  const follow = (event) => {
    const box = area.getBoundingClientRect();
    show(nearest(all, first + (last - first) * (event.clientX - box.left) / box.width));
  };
  area.addEventListener("pointermove", follow);
  area.addEventListener("pointerdown", follow);
  area.addEventListener("pointerleave", hide);
  plot.addEventListener("blur", hide);
  plot.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    show(at + step);
  });
}
// A printed report shows everything.
addEventListener("beforeprint", () => { for (const part of document.querySelectorAll("details")) part.open = true; });
