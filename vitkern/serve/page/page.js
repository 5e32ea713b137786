"use strict";
// One picture at a time: post it, draw its classes as bars and its attention over it.

const TOP = 5;
const LONGEST_SIDE = 1200; // of the canvas, in pixels
const element = (name) => document.getElementById(name);
let about = { attention: true, classes: 1 };
let shown = null; // {bitmap, answer} on the canvas
let latest = 0; // number of the last question: answers to older ones are dropped

function say(words, bad = false) {
  element("status").textContent = words;
  element("status").classList.toggle("bad", bad);
}

async function ask(file) {
  const mine = ++latest;
  element("classes").replaceChildren();
  element("time").textContent = "";
  element("views").hidden = element("legend").hidden = true;
  shown = null;
  say("Asking the model …");
  let bitmap = null;
  try {
    bitmap = await createImageBitmap(file); // upright, as the server turns it
    if (mine !== latest) return;
    draw({ bitmap, answer: null });
  } catch {
    if (mine !== latest) return;
    element("picture").hidden = true; // a format that this browser cannot show: the server may
    element("hint").hidden = false;
    element("hint").textContent = "This browser cannot show the picture.";
  }
  const begin = performance.now();
  try {
    const address = about.classes ? `predict?top=${TOP}&attention=${about.attention}` : "embed";
    const response = await fetch(address, {
      method: "POST",
      body: file,
      headers: { "Content-Type": "application/octet-stream" },
    });
    const answer = await response.json();
    if (mine !== latest) return;
    if (!response.ok) {
      say(answer.message || `The server answered ${response.status}.`, true);
      return;
    }
    report(answer, performance.now() - begin);
    if (bitmap) draw({ bitmap, answer });
  } catch (error) {
    if (mine === latest) say(`The server does not answer (${error.message}).`, true);
  }
}

function percent(share) {
  return `${(100 * share).toFixed(share < 0.0995 ? 1 : 0)} %`;
}

function report(answer, milliseconds) {
  element("time").textContent = `${answer.model}, ${milliseconds.toFixed(0)} ms with the upload`;
  if (answer.embedding) {
    const first = answer.embedding.slice(0, 4).map((one) => one.toFixed(3)).join(", ");
    say(`A vector of ${answer.embedding.length} numbers: ${first}, … This model has no classifier.`);
    return;
  }
  const best = answer.top[0];
  say(`${best.label}, ${percent(best.probability)}`);
  const bars = answer.top.map((one) => {
    const item = document.createElement("li");
    const fill = document.createElement("span");
    const name = document.createElement("span");
    const share = document.createElement("span");
    fill.className = "fill";
    fill.style.width = `${100 * one.probability}%`;
    name.textContent = one.label;
    share.className = "share";
    share.textContent = percent(one.probability);
    item.append(fill, name, share);
    return item;
  });
  element("classes").replaceChildren(...bars);
}

function draw(next) {
  shown = next;
  const { bitmap, answer } = next;
  const canvas = element("picture");
  const scale = Math.min(1, LONGEST_SIDE / Math.max(bitmap.width, bitmap.height));
  canvas.width = Math.max(1, Math.round(bitmap.width * scale));
  canvas.height = Math.max(1, Math.round(bitmap.height * scale));
  canvas.hidden = false;
  element("hint").hidden = true;
  element("stage").classList.add("full");
  const context = canvas.getContext("2d");
  const view = document.querySelector("input[name=view]:checked").value;
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  const attention = answer && answer.attention;
  element("views").hidden = element("legend").hidden = !attention;
  const best = answer && answer.top ? `the picture: ${answer.top[0].label}` : "the picture";
  canvas.setAttribute("aria-label", attention ? `${best}; bright where the model looks` : best);
  if (attention && view !== "plain") overlay(context, canvas, attention, view);
}

// Attention as a small picture, one pixel a patch, which the canvas enlarges smoothly.
function overlay(context, canvas, attention, view) {
  const rows = attention.weights.length;
  const columns = attention.weights[0].length;
  const flat = attention.weights.flat();
  const low = Math.min(...flat);
  const span = Math.max(Math.max(...flat) - low, 1e-12);
  const pixels = new ImageData(columns, rows);
  flat.forEach((weight, i) => {
    const share = (weight - low) / span;
    const colour = view === "heat" ? heat(share) : [0, 0, 0, 165 * (1 - share)];
    pixels.data.set(colour, 4 * i);
  });
  const small = document.createElement("canvas");
  small.width = columns;
  small.height = rows;
  small.getContext("2d").putImageData(pixels, 0, 0);
  const [left, top, right, bottom] = attention.part;
  const box = [left * canvas.width, top * canvas.height,
    (right - left) * canvas.width, (bottom - top) * canvas.height];
  if (view === "light") shade(context, canvas, box);
  context.imageSmoothingEnabled = true;
  context.imageSmoothingQuality = "high";
  context.drawImage(small, ...box);
  context.lineWidth = Math.max(1, canvas.width / 400);
  context.strokeStyle = "rgba(255, 255, 255, 0.85)";
  context.strokeRect(...box);
}

// What the model did not see, as dark as what it did not look at.
function shade(context, canvas, [x, y, width, height]) {
  context.fillStyle = "rgba(0, 0, 0, 0.65)";
  context.beginPath();
  context.rect(0, 0, canvas.width, canvas.height);
  context.rect(x, y, width, height);
  context.fill("evenodd");
}

// From nothing over violet and orange to yellow: ordered in lightness, so that it reads in grey.
function heat(share) {
  const stops = [[40, 11, 84], [136, 34, 106], [227, 89, 51], [249, 201, 50], [252, 255, 164]];
  const place = share * (stops.length - 1);
  const i = Math.min(Math.floor(place), stops.length - 2);
  const mix = (k) => stops[i][k] + (stops[i + 1][k] - stops[i][k]) * (place - i);
  return [mix(0), mix(1), mix(2), 70 + 120 * share];
}

function take(files) {
  const file = [...files].find((one) => one.type.startsWith("image/")) || files[0];
  if (file) ask(file);
}

element("file").addEventListener("change", (event) => {
  take(event.target.files);
  event.target.value = ""; // the same file may be chosen again
});
document.addEventListener("paste", (event) => take(event.clipboardData.files));
for (const name of ["dragenter", "dragover"]) {
  document.addEventListener(name, (event) => {
    event.preventDefault();
    element("drop").classList.add("over");
  });
}
document.addEventListener("dragleave", (event) => {
  if (!event.relatedTarget) element("drop").classList.remove("over");
});
document.addEventListener("drop", (event) => {
  event.preventDefault();
  element("drop").classList.remove("over");
  take(event.dataTransfer.files);
});
for (const radio of document.querySelectorAll("input[name=view]")) {
  radio.addEventListener("change", () => shown && draw(shown));
}

fetch("about").then((response) => response.json()).then((found) => {
  about = found;
  const [down, across] = found.image_size;
  const classes = found.classes ? `${found.classes} classes` : "no classifier, vectors alone";
  element("about").textContent =
    `${found.model}: ${classes}, ${down} × ${across} pixels, ${found.precision}.` +
    " Drop a picture to see what it makes of it.";
}).catch(() => say("The server does not answer.", true));
