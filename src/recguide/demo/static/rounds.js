// Steps through the rounds of a picture: keys, slider, play, zoom. Only what is in view is in the page.
const find = (selector) => element.querySelector(selector);
const rounds = find(".rg-rounds"), side = find(".rg-side"), map = find(".rg-map");
const slider = find(".rg-bar input[type=range]"), output = find(".rg-bar output");
const play = find("[data-do=play]"), player = find(".rg-player"), empty = find(".rg-none"), live = find(".rg-live");
let picture = null, slots = [], now = 0, zoom = 1, timer = null;

const isShown = () => element.offsetParent !== null;
const width = (svg) => Number(/ width="([\d.]+)"/.exec(svg)[1]);
const height = (svg) => Number(/ height="([\d.]+)"/.exec(svg)[1]);

const watcher = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    if (isIntersecting && !target.firstChild) { target.innerHTML = picture.rounds[target.dataset.round].svg; fit(target); }
    else if (!isIntersecting && target.firstChild) target.replaceChildren();
  }
}, { root: rounds, rootMargin: "600px" });

function fit(slot) {
  const svg = slot.firstElementChild, made = picture.rounds[slot.dataset.round].svg;
  slot.style.height = `${height(made) * zoom}px`;
  slot.style.width = `${widest() * zoom + 12}px`;
  if (svg) { svg.style.width = `${width(made) * zoom}px`; svg.style.height = `${height(made) * zoom}px`; }
}

let widestKnown = 0;
function widest() {
  if (!widestKnown) widestKnown = Math.max(...picture.rounds.map((round) => width(round.svg)));
  return widestKnown;
}

function setZoom(value) {
  zoom = Math.max(0.15, Math.min(2.5, value));
  if (!picture) return;
  slots.forEach(fit);
  go(now);
}

const fitting = () => (rounds.clientWidth - 24) / widest();
function fitAll() { setZoom(fitting()); }

function go(index) {
  if (!picture || !picture.rounds.length) return;
  now = Math.max(0, Math.min(picture.rounds.length - 1, index));
  slots.forEach((slot, i) => slot.classList.toggle("current", i === now));
  map.querySelectorAll("g[data-round]").forEach((g) => g.classList.toggle("current", Number(g.dataset.round) === now));
  const slot = slots[now], top = slot.offsetTop, bottom = top + slot.offsetHeight;
  if (top < rounds.scrollTop + 8) rounds.scrollTop = Math.max(0, top - 40);
  else if (bottom > rounds.scrollTop + rounds.clientHeight - 8) rounds.scrollTop = bottom - rounds.clientHeight + 40;
  side.innerHTML = picture.rounds[now].detail;
  side.scrollTop = 0;
  slider.value = now;
  slider.setAttribute("aria-valuetext", picture.rounds[now].label);
  output.textContent = `${now + 1} / ${picture.rounds.length}`;
  live.textContent = timer ? "" : picture.rounds[now].label;
}

function stop() {
  clearInterval(timer);
  timer = null;
  play.setAttribute("aria-pressed", "false");
  play.setAttribute("aria-label", "play");
}

function toggle() {
  if (timer) return stop();
  if (!picture) return;
  if (now === picture.rounds.length - 1) go(0);
  timer = setInterval(() => { if (!isShown() || now >= picture.rounds.length - 1) stop(); else go(now + 1); }, 900);
  play.setAttribute("aria-pressed", "true");
  play.setAttribute("aria-label", "pause");
}

const ACTIONS = {
  first: () => go(0), back: () => go(now - 1), play: toggle, next: () => go(now + 1), last: () => go(picture.rounds.length - 1),
  in: () => setZoom(zoom * 1.25), out: () => setZoom(zoom / 1.25), fit: fitAll,
};
const KEYS = { ArrowRight: "next", ArrowLeft: "back", ArrowDown: "next", ArrowUp: "back", Home: "first", End: "last", " ": "play", "+": "in", "=": "in", "-": "out", 0: "fit" };

element.addEventListener("click", (event) => {
  const button = event.target.closest("[data-do]"), slot = event.target.closest("[data-round]");
  if (button && picture) { if (button.dataset.do !== "play") stop(); ACTIONS[button.dataset.do](); }
  else if (slot) { stop(); go(Number(slot.dataset.round)); }
});
slider.addEventListener("input", () => { stop(); go(Number(slider.value)); });
element.addEventListener("keydown", (event) => {
  if (!picture || event.ctrlKey || event.metaKey || event.altKey) return;
  // A button presses itself with the space bar; the slider moves itself with the arrows.
  if (event.target.tagName === "BUTTON" && event.key === " ") return;
  if (event.target === slider && !["+", "=", "-", "0", " "].includes(event.key)) return;
  const action = KEYS[event.key];
  if (!action) return;
  event.preventDefault();
  if (action !== "play") stop();
  ACTIONS[action]();
});

function draw() {
  stop();
  watcher.disconnect();
  picture = props.value && props.value.rounds && props.value.rounds.length ? props.value : null;
  player.hidden = !picture;
  empty.hidden = !!picture;
  rounds.replaceChildren();
  if (!picture) return;
  widestKnown = 0;
  map.innerHTML = picture.strip;
  slider.max = picture.rounds.length - 1;
  slots = picture.rounds.map((_, i) => {
    const slot = document.createElement("div");
    slot.className = "rg-slot";
    slot.dataset.round = i;
    rounds.append(slot);
    fit(slot);
    watcher.observe(slot);
    return slot;
  });
  rounds.scrollTop = rounds.scrollLeft = 0;
  // All of the width where that can be read, else as it is.
  setZoom(rounds.clientWidth ? Math.max(0.8, Math.min(1, fitting())) : 1);
  go(0);
}

watch("value", draw);
draw();
