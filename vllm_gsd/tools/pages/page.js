"use strict";
// What all pages share: the data, and charts that follow the width of their place.
const data = JSON.parse(document.getElementById("data").textContent);
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/** Draw `spec(width)`, options of Plot.plot, into the element `id`, again whenever its width or the colours change. */
function chart(id, label, spec) {
  const place = document.getElementById(id);
  let drawn = 0;
  const draw = () => {
    const options = spec(place.clientWidth);
    const base = { width: place.clientWidth, marginBottom: 42, ariaLabel: label, style: { fontSize: "12px", background: "none" } };
    place.replaceChildren(Plot.plot({ ...base, ...options }));
  };
  new ResizeObserver(() => {
    if (place.clientWidth && place.clientWidth !== drawn) {
      drawn = place.clientWidth;
      draw();
    }
  }).observe(place);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
}
