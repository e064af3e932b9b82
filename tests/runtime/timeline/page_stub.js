// A document with one canvas that counts what is drawn, for running the page's script in node.
"use strict";
const fs = require("fs");
const page = fs.readFileSync(process.argv[2], "utf8");
const script = page.split("<script>")[1].split("</script>")[0];
const drawn = { fillRect: 0, fillText: [], fill: 0 };
const pen = new Proxy({}, {
  get: (_, name) => {
    if (name === "measureText") return (text) => ({ width: 7 * text.length });
    if (name === "fillRect") return (...at) => { if (at.some(Number.isNaN)) throw Error("NaN"); drawn.fillRect++; };
    if (name === "fillText") return (text) => drawn.fillText.push(text);
    if (name === "fill") return () => drawn.fill++;
    return () => undefined;
  },
  set: () => true,
});
const heard = {};
const element = () => ({
  style: { setProperty() {} }, clientWidth: 1000, offsetWidth: 100, textContent: "",
  getContext: () => pen, append() {}, setPointerCapture() {},
  getBoundingClientRect: () => ({ left: 0, top: 0 }),
  addEventListener(name, handle) { heard[name] = handle; },
});
const elements = { canvas: element(), tip: element(), legend: element() };
global.window = { addEventListener() {}, matchMedia: () => ({ addEventListener() {} }), devicePixelRatio: 1 };
global.document = { getElementById: (id) => elements[id], createElement: element, documentElement: {} };
global.getComputedStyle = () => ({ getPropertyValue: () => "#000" });
(0, eval)(script);
const tips = [];
for (let y = 0; y < 400; y += 8)
  for (let x = 0; x < 1000; x += 3) {
    heard.pointermove({ clientX: x, clientY: y });
    if (elements.tip.textContent && !tips.includes(elements.tip.textContent)) tips.push(elements.tip.textContent);
  }
const key = (name) => heard.keydown({ key: name, preventDefault() {} });
["+", "+", "ArrowRight", "ArrowLeft", "-", "0"].forEach(key);
heard.wheel({ deltaX: 0, deltaY: -100, clientX: 500, preventDefault() {} });
heard.dblclick();
console.log(JSON.stringify({ ...drawn, tips }));
