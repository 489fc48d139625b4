// The race: while it is run, what has come of each; then all again on one clock, as fast as each was alone.
const find = (selector) => element.querySelector(selector);
const lanes = find(".rg-lanes"), bar = find(".rg-bar"), slider = find(".rg-bar input"), output = find(".rg-bar output");
const play = find("[data-do=play]"), empty = find(".rg-none");
let race = null, built = [], clock = 0, speed = 1, frame = null, before = 0;

const longest = () => Math.max(1, ...race.lanes.map((lane) => (lane.commits.length ? lane.commits.at(-1)[0] : 0)));

function build() {
  lanes.replaceChildren();
  built = race.lanes.map((lane) => {
    const box = document.createElement("section");
    box.className = "rg-lane";
    box.innerHTML = '<h3><span class="name"></span><span class="place"></span></h3><progress max="1" value="0"></progress>'
      + "<dl><dt>tokens</dt><dd></dd><dt>forwards</dt><dd></dd><dt>query tokens</dt><dd></dd><dt>ms</dt><dd></dd></dl>"
      + '<div class="text"></div>';
    box.querySelector(".name").textContent = lane.label;
    box.querySelector("progress").setAttribute("aria-label", `progress of ${lane.label}`);
    lanes.append(box);
    return { box, figures: box.querySelectorAll("dd"), text: box.querySelector(".text"), html: null, tokens: [], seen: -1 };
  });
}

function show(at) {
  const ends = race.lanes.map((lane) => (lane.done ? lane.commits.at(-1)?.[0] ?? 0 : Infinity));
  const order = [...ends].sort((a, b) => a - b);
  race.lanes.forEach((lane, i) => {
    const view = built[i];
    if (view.html !== lane.html) {
      view.text.innerHTML = lane.html;
      view.html = lane.html;
      view.tokens = [...view.text.querySelectorAll(".tok")];
      view.seen = -1;
    }
    let commit = [0, 0, 0, 0];
    for (const one of lane.commits) if (one[0] <= at) commit = one;
    const [ms, tokens, forwards, query] = commit;
    const visible = lane.commits.length && at >= 0 ? tokens + 1 : 0;
    if (view.seen !== visible) {
      view.tokens.forEach((token, n) => token.classList.toggle("unseen", n >= visible));
      view.seen = visible;
    }
    [tokens, forwards, query, Math.round(Math.min(at, ends[i] === Infinity ? at : ends[i]))].forEach((value, n) => {
      view.figures[n].textContent = Number.isFinite(value) ? value : Math.round(ms);
    });
    view.box.querySelector("progress").value = race.total ? tokens / race.total : 0;
    const arrived = race.done && at >= ends[i];
    const place = order.indexOf(ends[i]) + 1;
    view.box.classList.toggle("won", arrived && place === 1);
    view.box.querySelector(".place").textContent = arrived ? (place === 1 ? "★ first" : `${place}.`) : race.done ? "" : lane.state;
  });
}

function at(ms) {
  clock = Math.max(0, Math.min(longest(), ms));
  slider.value = Math.round((1000 * clock) / longest());
  output.textContent = `${Math.round(clock)} ms`;
  show(clock);
}

function stop() {
  cancelAnimationFrame(frame);
  frame = null;
  play.setAttribute("aria-pressed", "false");
  play.setAttribute("aria-label", "play");
}

function tick(now) {
  at(clock + (now - before) * speed);
  before = now;
  if (clock >= longest()) return stop();
  frame = requestAnimationFrame(tick);
}

function start() {
  if (clock >= longest()) clock = 0;
  before = performance.now();
  play.setAttribute("aria-pressed", "true");
  play.setAttribute("aria-label", "pause");
  frame = requestAnimationFrame(tick);
}

element.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (!button || !race || !race.done) return;
  if (button === play) return frame ? stop() : start();
  speed = Number(button.dataset.speed);
  bar.querySelectorAll("[data-speed]").forEach((one) => one.setAttribute("aria-pressed", String(one === button)));
});
slider.addEventListener("input", () => { stop(); at((slider.value / 1000) * longest()); });

function draw() {
  stop();
  const was = race;
  race = props.value && props.value.lanes ? props.value : null;
  empty.hidden = !!race;
  bar.hidden = !(race && race.done);
  if (!race) return lanes.replaceChildren();
  if (!was || built.length !== race.lanes.length || lanes.children.length === 0) build();
  if (!race.done) return show(Infinity);
  clock = 0;
  if (matchMedia("(prefers-reduced-motion: reduce)").matches) at(longest());
  else start();
}

watch("value", draw);
draw();
