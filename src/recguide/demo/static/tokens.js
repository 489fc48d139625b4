// What is known of a token, beside it: with the pointer, a tap, or the arrow keys.
const card = document.createElement("div");
card.className = "rg-card";
card.hidden = true;
// Outside of the component, whose content is replaced as the answer grows.
(element.closest(".gradio-container") || document.body).append(card);
let current = null;

const NAMES = { seed: "seed", accepted: "accepted draft", correction: "correction", bonus: "bonus" };

function rowsOf(data) {
  const rows = [["round", data.r || "prefill"]];
  if (data.m !== undefined) rows.push(["margin", `${data.m}  (p ${data.p})`]);
  if (data.s !== undefined) rows.push(["second", `“${data.s}”  ${data.q}`]);
  if (data.m === undefined && data.r) rows.push(["draft", "none for this place"]);
  rows.push(["entropy", data.e === undefined ? "not taken" : `${data.e} nats`]);
  return rows;
}

function show(token) {
  if (current) current.classList.remove("current");
  current = token;
  card.hidden = !token;
  if (!token) return;
  token.classList.add("current");
  const title = document.createElement("strong");
  title.textContent = `${NAMES[token.dataset.k]}: “${token.textContent}”`;
  const list = document.createElement("dl");
  for (const [name, value] of rowsOf(token.dataset)) {
    const dt = document.createElement("dt"), dd = document.createElement("dd");
    dt.textContent = name;
    dd.textContent = value;
    list.append(dt, dd);
  }
  card.replaceChildren(title, list);
  place();
}

function place() {
  if (!current) return;
  const box = current.getClientRects()[0] || current.getBoundingClientRect();
  const room = document.documentElement.clientWidth - card.offsetWidth - 8;
  card.style.left = `${Math.max(8, Math.min(box.left, room))}px`;
  const below = box.bottom + 8, fits = below + card.offsetHeight < window.innerHeight;
  card.style.top = `${fits ? below : Math.max(8, box.top - card.offsetHeight - 8)}px`;
}

const tokenAt = (event) => event.target.closest && event.target.closest(".rg-answer .tok");
element.addEventListener("mouseover", (event) => show(tokenAt(event) || null));
element.addEventListener("mouseleave", () => show(null));
element.addEventListener("click", (event) => show(tokenAt(event) || null));
element.addEventListener("focusout", () => show(null));
element.addEventListener("keydown", (event) => {
  if (event.key === "Escape") return show(null);
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step || !event.target.closest(".rg-answer")) return;
  const tokens = [...element.querySelectorAll(".rg-answer .tok")];
  if (!tokens.length) return;
  event.preventDefault();
  const index = current ? tokens.indexOf(current) + step : 0;
  const token = tokens[Math.max(0, Math.min(tokens.length - 1, index))];
  token.scrollIntoView({ block: "nearest" });
  show(token);
});
window.addEventListener("scroll", place, { passive: true, capture: true });
