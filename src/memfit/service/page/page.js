// The page: looks at the service once a second, and follows the run that is chosen.
import { ask, download, follow, post, Refused, setToken, takeToken, upload } from "/page/api.js";
import { chooseStudy, lookAtStudies } from "/page/studies.js";
import { bars, bytes, curve, element, span, strip } from "/page/draw.js";

const at = (id) => document.getElementById(id);
const OVER = ["planned", "done", "failed", "refused", "cancelled"];
const MOST_LINES = 2000;
let me = null, chosen = null, leaving = null, run = null, points = new Map(), lines = [], due = false, signed = 0;

function put(id, ...children) { at(id).replaceChildren(...children); }
function say(id, text) { if (at(id).textContent !== text) at(id).textContent = text; }

function theme(name) {
  document.documentElement.dataset.theme = name;
  say("theme", name === "dark" ? "Light" : "Dark");
}
theme(localStorage.getItem("memfit-theme") || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
at("theme").addEventListener("click", () => {
  theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
  localStorage.setItem("memfit-theme", document.documentElement.dataset.theme);
});

function when(each) {
  if (each.state === "waiting" && each.expected_start) return `${each.reason}; may start in ${span(each.expected_start - Date.now() / 1000)}`;
  if (each.state === "running" && each.expected_end) return `${each.reason}; about ${span(each.expected_end - Date.now() / 1000)} left`;
  return each.reason === each.state ? "" : each.reason;
}

function row(each) {
  const button = element("button", { type: "button", "data-run": each.run, "aria-pressed": String(each.run === chosen) }, `${each.run} ${each.name}`);
  button.addEventListener("click", () => choose(each.run));
  const size = each.plan ? `${bytes(each.plan.peak_bytes)} / ${bytes(each.plan.budget_bytes)}` : "";
  const steps = each.plan?.total_steps ? `${each.step ?? (each.state === "done" ? each.plan.total_steps : 0)} / ${each.plan.total_steps}` : "";
  const cells = [button, each.asked ? `${each.state} (${each.asked} asked)` : each.state, size, steps, when(each)];
  const why = element("span", { class: "why" }, cells.pop());
  return element("tr", each.run === chosen ? { class: "selected" } : {}, ...cells.concat(why).map((cell) => element("td", {}, cell)));
}

function showRuns(found) {
  const focused = document.activeElement?.dataset?.run;
  put("runs", ...found.map(row));
  if (focused) at("runs").querySelector(`[data-run="${focused}"]`)?.focus();
  at("no-runs").hidden = found.length > 0;
}

async function look() {
  try {
    const [found, devices] = await Promise.all([ask("/v1/runs?limit=50"), ask("/v1/devices")]);
    showRuns(found);
    await lookAtStudies(me, choose);
    put("devices", ...devices.devices.map((each) => strip(each, devices.now, choose)));
    say("connection", "Connected");
  } catch (error) {
    if (error instanceof Refused && error.status === 401) { signOut("This token is not good any more."); return; }
    say("connection", "The service does not answer; trying again");
  }
}

function choose(number) {
  if (number === chosen) return;
  leaving?.abort();
  leaving = new AbortController();
  chosen = number; run = null; points = new Map(); lines = [];
  for (const id of ["events", "output", "files", "words", "bytes", "loss", "run-problem"]) put(id);
  at("run-section").hidden = false;
  say("run-title", `Run ${number}`);
  at("run-title").focus();
  follow(number, told, leaving.signal).then(() => files(number));
  look();
}

function told(kind, content) {
  if (kind === "run") { const before = run; run = content; if (!before?.plan !== !content.plan || before?.state !== content.state) plan(); }
  if (kind === "metrics" && "loss" in content) points.set(content.step, content);
  if (kind === "event") at("events").append(element("li", {}, `${new Date(content.time * 1000).toLocaleTimeString()} ${content.kind}: ${content.text}`));
  if (kind === "output") lines = lines.concat(content.lines).slice(-MOST_LINES);
  if (!due) { due = true; requestAnimationFrame(showRun); }
}

function showRun() {
  due = false;
  if (!run) return;
  say("run-title", `${run.name} (run ${run.run})`);
  const last = [...points.values()].at(-1);
  say("run-state", [run.state, when(run)].filter(Boolean).join(": ") + (last && run.plan?.total_steps ? `. Step ${last.step} of ${run.plan.total_steps}.` : ""));
  const mine = me.role === "admin" || (me.role === "submit" && me.name === run.owner);
  at("pause").disabled = !mine || !["waiting", "running"].includes(run.state) || run.asked !== "";
  at("resume").disabled = !mine || run.state !== "paused";
  at("cancel").disabled = !mine || OVER.includes(run.state) || run.asked === "cancel";
  const peaks = [...points.values()].map((point) => point.peak_bytes || 0);
  put("bytes", bars({ ...run, measured_peak_bytes: Math.max(run.measured_peak_bytes || 0, ...peaks) || null }));
  put("loss", curve([...points.values()].sort((a, b) => a.step - b.step), run.plan?.total_steps, OVER.includes(run.state)));
  const output = at("output"), below = output.scrollHeight - output.scrollTop - output.clientHeight < 40;
  say("output", lines.join("\n"));
  if (below) output.scrollTop = output.scrollHeight;
}

async function plan() {
  const number = chosen;
  try {
    const { plan: found, text } = await ask(`/v1/runs/${number}/plan`);
    if (number === chosen) say("words", found ? text : "There is no plan.");
  } catch { /* the next change asks again */ }
}

async function files(number) {
  if (number !== chosen) return;
  try {
    const found = await ask(`/v1/runs/${number}/artifacts`);
    if (!found.length) put("files", element("li", {}, "There are none."));
    else put("files", ...found.map((file) => {
      const button = element("button", { type: "button" }, `${file.name} (${bytes(file.bytes)})`);
      button.addEventListener("click", () => download(`/v1/runs/${number}/artifacts/${file.name.split("/").map(encodeURIComponent).join("/")}`, file.name.split("/").at(-1)));
      return element("li", {}, button);
    }));
  } catch { /* there are none */ }
}

for (const verb of ["pause", "resume", "cancel"]) {
  at(verb).addEventListener("click", async () => {
    const number = chosen;
    try {
      put("run-problem");
      await post(`/v1/runs/${number}/${verb}`);
      look();
    } catch (error) { say("run-problem", error.message); }
  });
}

at("new").addEventListener("click", () => {
  if (!at("run-file").value) at("run-file").value = JSON.stringify(me.example || { model: {}, data: {}, fit: { budget: "1GiB" } }, null, 1);
  put("submit-problem");
  at("submit").showModal();
});
at("submit-close").addEventListener("click", () => at("submit").close());
at("submit-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  try {
    let config;
    try { config = JSON.parse(at("run-file").value); } catch (error) { throw new Error(`The run file is no JSON: ${error.message}`); }
    const [archive] = at("code").files;
    const code = archive ? await upload(archive) : null;
    const study = "search" in config;
    const found = await post(study ? "/v1/studies" : "/v1/runs", { config, name: at("run-name").value, code, plan_only: at("plan-only").checked }, { "idempotency-key": Array.from(crypto.getRandomValues(new Uint32Array(4)), String).join("-") });
    at("submit").close();
    if (study) chooseStudy(found.study, me, choose); else choose(found.run);
  } catch (error) { say("submit-problem", error.message); }
});

function signOut(why) {
  setToken(null);
  signed += 1;
  me = null;
  for (const id of ["devices-section", "runs-section", "run-section", "studies-section", "study-section", "new"]) at(id).hidden = true;
  at("sign-in").hidden = false;
  say("connection", "Not signed in");
  say("sign-in-problem", why);
  at("token").focus();
}

async function signIn() {
  const turn = ++signed;
  try {
    me = await ask("/v1/me");
  } catch (error) {
    if (error instanceof Refused) signOut("This token is not good: look at what memfit serve has told.");
    else { say("connection", "The service does not answer; trying again"); setTimeout(() => turn === signed && signIn(), 2000); }
    return;
  }
  at("sign-in").hidden = true;
  say("who", `${me.name}, ${me.role}`);
  for (const id of ["devices-section", "runs-section"]) at(id).hidden = false;
  at("new").hidden = me.role === "read";
  while (turn === signed) {
    await look();
    await new Promise((done) => setTimeout(done, document.hidden ? 5000 : 1000));
  }
}

at("sign-in").addEventListener("submit", (event) => {
  event.preventDefault();
  setToken(at("token").value.trim());
  at("token").value = "";
  signIn();
});

if (takeToken()) signIn(); else signOut("");
