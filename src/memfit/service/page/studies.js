// Studies on the page: how far each has come, and the trials of the one that is chosen.
import { ask, download, post } from "/page/api.js";
import { bytes, element, trials as picture } from "/page/draw.js";

const at = (id) => document.getElementById(id);
const STILL = ["running", "waiting"];
let chosen = null, shown = "", runs = () => {};

const number = (value) => (value === null ? "not a number" : Number(value).toPrecision(5));
const over = (study) => Object.entries(study.states).reduce((sum, [state, many]) => (STILL.includes(state) ? sum : sum + many), 0);

function item(study, me, choose) {
  const [best] = study.best;
  const told = best ? `, best: trial ${best.trial}, ${study.objectives.map(([name], index) => `${name} ${number(best.values[index])}`).join(", ")}` : "";
  const button = element("button", { type: "button", "data-study": study.study, "aria-pressed": String(study.study === chosen) }, `${study.study} ${study.name}`);
  button.addEventListener("click", () => chooseStudy(study.study, me, choose));
  const bar = element("progress", { max: study.trials_asked, value: over(study), "aria-label": `Trials of ${study.name}` });
  return element("li", {}, button, bar, element("span", {}, `${study.state}: ${over(study)} of ${study.trials_asked} trials${told}. ${study.reason}`));
}

export async function lookAtStudies(me, choose) {
  const found = await ask("/v1/studies?limit=20");
  const focused = document.activeElement?.dataset?.study;
  at("studies-section").hidden = found.length === 0;
  at("studies").replaceChildren(...found.map((study) => item(study, me, choose)));
  if (focused) at("studies").querySelector(`[data-study="${focused}"]`)?.focus();
  if (chosen !== null) await show(me);
}

export async function chooseStudy(study, me, choose) {
  chosen = study; shown = ""; runs = choose;
  at("study-problem").replaceChildren();
  at("study-section").hidden = false;
  at("study-title").textContent = `Study ${study}`;
  at("study-title").focus();
  await show(me);
}

async function show(me) {
  const study = await ask(`/v1/studies/${chosen}`);
  if (study.study !== chosen) return;
  const state = `${study.state}: ${study.reason}`;
  if (at("study-state").textContent !== state) at("study-state").textContent = state;
  const mine = me.role === "admin" || (me.role === "submit" && me.name === study.owner);
  at("study-cancel").disabled = !mine || study.state !== "running" || study.asked !== "";
  const now = JSON.stringify([study.trials, study.state]);
  if (now === shown) return;  // what is focused in the table stays so
  shown = now;
  at("study-title").textContent = `${study.name} (study ${study.study})`;
  at("study-picture").replaceChildren(picture(study));
  at("trials").replaceChildren(...study.trials.map((trial) => {
    const name = trial.run === null ? String(trial.number) : element("button", { type: "button" }, `${trial.number}, run ${trial.run}`);
    if (trial.run !== null) name.addEventListener("click", () => runs(trial.run));
    const given = Object.entries(trial.params).map(([key, value]) => `${key}=${value}`).join(", ");
    const why = trial.why && trial.why !== trial.state ? `${given}; ${trial.why}` : given;
    const cells = [name, trial.state, trial.values.map(number).join(", "), trial.peak_bytes ? bytes(trial.peak_bytes) : "", why];
    const best = study.best.some((each) => each.trial === trial.number);
    return element("tr", best ? { class: "selected" } : {}, ...cells.map((cell) => element("td", {}, cell)));
  }));
  const files = await ask(`/v1/studies/${study.study}/artifacts`);
  at("study-files").replaceChildren(...files.map((file) => {
    const button = element("button", { type: "button" }, `${file.name} (${bytes(file.bytes)})`);
    button.addEventListener("click", () => download(`/v1/studies/${study.study}/artifacts/${encodeURIComponent(file.name)}`, file.name));
    return element("li", {}, button);
  }));
}

at("study-cancel").addEventListener("click", async () => {
  try {
    at("study-problem").replaceChildren();
    await post(`/v1/studies/${chosen}/cancel`);
  } catch (error) { at("study-problem").textContent = error.message; }
});
