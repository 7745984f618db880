// Folding, search and filters of a listing or a diff; rows are those with the class "code-row".
const details = [...document.querySelectorAll("main > details, section > details")];
const fold = open => () => details.forEach(one => { one.open = open; });
document.getElementById("fold").onclick = fold(false);
document.getElementById("unfold").onclick = fold(true);
const rows = [...document.querySelectorAll(".code-row")];
const search = document.getElementById("search"), hits = document.getElementById("hits");
let found = [], next = 0;
search.addEventListener("input", () => {
  const wanted = search.value.trim().toLowerCase();
  found = wanted ? rows.filter(row => row.dataset.text.toLowerCase().includes(wanted)) : [];
  const own = new Set(found);
  rows.forEach(row => row.classList.toggle("found", own.has(row)));
  next = 0;
  hits.textContent = wanted ? `${found.length} instructions; Enter shows the next` : "";
});
search.addEventListener("keydown", event => {
  if (event.key !== "Enter" || !found.length) return;
  const row = found[next++ % found.length];
  row.closest("details").open = true;
  row.scrollIntoView({ block: "center" });
});
for (const box of document.querySelectorAll("[data-hides]")) {
  box.addEventListener("change", () => document.body.classList.toggle("hide-" + box.dataset.hides, box.checked));
}
const mark = (row, on) => (row.dataset.to || "").split(" ").forEach(name => {
  const other = name && document.getElementById("i" + name);
  if (other && other !== row) other.classList.toggle("hit", on);
});
for (const row of document.querySelectorAll(".row.code-row")) {
  for (const [name, on] of [["mouseenter", true], ["mouseleave", false], ["focus", true], ["blur", false]]) row.addEventListener(name, () => mark(row, on));
  row.addEventListener("click", () => row.classList.toggle("pin"));
  row.addEventListener("keydown", event => { if (event.key === "Enter") row.classList.toggle("pin"); });
}
