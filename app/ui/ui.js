const RUNS_PERIOD_MS = 5000;  // between two looks at a list
const RUN_PERIOD_MS = 2000;  // between two looks at a run that goes on
const CURVES = [  // title, kind of record, metric, whether the axis is logarithmic
  ["Training loss", "step", "loss", false], ["Validation loss", "epoch", "val_loss", false],
  ["Validation accuracy", "epoch", "val_accuracy", false], ["Perplexity", "epoch", "val_perplexity", true],
  ["Learning rate", "step", "lr", false], ["Gradient norm", "step", "grad_norm", true],
  ["Samples per second", "step", "samples_per_s", false], ["Waiting for data", "step", "data_stall", false],
  ["Model FLOPs utilization", "step", "mfu", false],
];
const MOODS = {succeeded: "good", running: "busy", stopped: "busy", failed: "bad", interrupted: "bad"};

const byId = (id) => document.getElementById(id);
const chosen = new Set();  // runs to compare, as JOB/ID
const charts = new Map();  // drawn in the current view, by title
let filters = {job: "", recipe: ""};
let look = 0;  // the number of the last look: an answer to an earlier one is out of date
let timer = null;

/** An element; what is given as text is shown as text. */
function make(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children.flat().filter((child) => child !== null));
  return made;
}

async function ask(path) {
  let answer;
  try {
    answer = await fetch(path, {cache: "no-store"});
  } catch {
    throw new Error(`Nothing answers at ${location.origin}: is 'rayloom ui' running?`);
  }
  const said = await answer.json().catch(() => ({error: answer.statusText}));
  if (answer.ok) return said;
  const error = new Error(said.error ?? answer.statusText);
  error.locked = answer.status === 401;
  throw error;
}

function say(text, mood) {
  const storage = byId("storage");
  if (storage.textContent !== text) storage.textContent = text;
  storage.className = `state quiet ${mood}`;
}

function lock(refusal) {
  byId("view").replaceChildren();
  byId("lock").hidden = false;
  byId("forget").hidden = true;
  byId("refusal").hidden = !refusal;
  byId("refusal").textContent = refusal ?? "";
  say("locked", "");
  byId("token").focus();
}

const panel = (heading, ...children) => make("section", {className: "panel"}, make("h2", {}, heading), children);
const state = (status) => make("span", {className: `state ${MOODS[status] ?? ""}`}, status);
const key = (run) => `${run.job}/${run.run_id}`;
const runLink = (run) => make("a", {href: `#/run/${key(run)}`}, run.run_id);
const time = (iso) => (iso ? iso.slice(0, 16).replace("T", " ") : "");

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "";
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  const minutes = Math.floor(Math.round(seconds) / 60);
  return minutes < 60 ? `${minutes} min ${Math.round(seconds) % 60} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

function value(given) {
  if (typeof given === "number") return words(given);
  return typeof given === "string" ? given : JSON.stringify(given);
}

/** A table that scrolls by itself where the screen is narrow. Cells are text or elements. */
function table(caption, columns, rows) {
  const isNumber = columns.map((_, index) => rows.length > 0 && rows.every((row) => typeof row[index] === "number"));
  const cells = (row) => row.map((cell, index) => make("td", {className: isNumber[index] ? "number" : ""},
    typeof cell === "number" ? words(cell) : cell ?? ""));
  const holder = make("div", {className: "table", tabIndex: 0}, make("table", {},
    make("thead", {}, make("tr", {}, columns.map((name, index) => make("th", {scope: "col", className: isNumber[index] ? "number" : ""}, name)))),
    make("tbody", {}, rows.map((row) => make("tr", {}, cells(row))))));
  holder.setAttribute("role", "region");
  holder.setAttribute("aria-label", caption);
  return holder;
}

/** The metrics that only some tasks have, as CURVES lists the others. */
function metricsOfTask(curves) {
  const known = new Set(CURVES.map(([, , metric]) => metric));
  const found = new Set(curves.flatMap((each) => Object.keys(each.of_epochs)));
  return [...found].filter((name) => name.startsWith("val_") && !known.has(name))
    .map((name) => [`Validation ${name.slice(4).replaceAll("_", " ")}`, "epoch", name, false]);
}

/** Draw the curves of some runs over one another: a chart for each metric that one of them has. */
function drawCurves(holder, runs, curves) {
  const wanted = [...CURVES, ...metricsOfTask(curves)].flatMap(([title, of, metric, isLog]) => {
    const series = runs.flatMap((name, index) => {
      const curve = curves[index][of === "step" ? "of_steps" : "of_epochs"][metric];
      return curve ? [{name, x: curve.steps, y: curve.values, kind: of === "step" ? "line" : "both", labels: null}] : [];
    });
    return series.length ? [{title, x_label: "step", y_label: metric, log_x: false, log_y: isLog, labels_points: false, series}] : [];
  });
  for (const data of wanted) {
    if (charts.has(data.title)) {
      charts.get(data.title).update(data);
      continue;
    }
    const figure = make("figure", {className: "chart"}, make("figcaption", {}, data.title));
    holder.append(figure);
    charts.set(data.title, new Chart(figure, data));
  }
  if (!wanted.length) holder.replaceChildren(make("p", {className: "quiet"}, "No step has been recorded."));
  else holder.querySelector("p")?.remove();
}

async function showRuns(view) {
  const query = new URLSearchParams(Object.entries(filters).filter(([, given]) => given));
  const runs = await ask(`api/runs?${query}`);
  return () => {
    if (!view.querySelector("#runs")) view.replaceChildren(runsPanel());
    const answer = JSON.stringify(runs);
    if (byId("runs").dataset.shown === answer) return RUNS_PERIOD_MS;  // what a person marks or clicks stays in place
    byId("runs").dataset.shown = answer;
    const compare = byId("compare");
    const present = runs.map((run) => {
      const box = make("input", {type: "checkbox", checked: chosen.has(key(run)), ariaLabel: `Compare ${key(run)}`});
      box.addEventListener("change", () => {
        if (box.checked) chosen.add(key(run)); else chosen.delete(key(run));
        compare.disabled = chosen.size < 2;
        compare.textContent = `Compare ${chosen.size || ""}`.trim();
      });
      return [box, run.job, runLink(run), state(run.status), run.recipe, time(run.began), duration(run.duration_s), run.headline];
    });
    const focused = document.activeElement?.getAttribute("aria-label");
    byId("runs").replaceChildren(runs.length
      ? table("Runs", ["", "job", "run", "status", "recipe", "began, UTC", "time", "result"], present)
      : make("p", {}, "No runs yet. ", make("code", {}, "rayloom submit train RECIPE"), " makes one."));
    if (focused) view.querySelector(`[aria-label="${CSS.escape(focused)}"]`)?.focus();
    return RUNS_PERIOD_MS;
  };
}

function runsPanel() {
  const job = make("select", {id: "job"}, ["", "lifecycle", "prepare", "train", "tune", "compile", "deploy"].map((name) =>
    make("option", {value: name}, name || "all")));
  const recipe = make("input", {id: "recipe", type: "search", placeholder: "all", value: filters.recipe});
  const compare = make("button", {id: "compare", type: "button", className: "main", disabled: chosen.size < 2}, "Compare");
  job.value = filters.job;
  job.addEventListener("change", () => { filters = {...filters, job: job.value}; route(); });
  recipe.addEventListener("change", () => { filters = {...filters, recipe: recipe.value.trim()}; route(); });
  compare.addEventListener("click", () => { location.hash = `#/compare/${[...chosen].join(",")}`; });
  return panel("Runs", make("div", {className: "filters"}, make("label", {}, "Job", job),
    make("label", {}, "Recipe", recipe), compare), make("div", {id: "runs"}));
}

async function showRun(view, name) {
  const [run, curves] = await Promise.all([ask(`api/runs/${name}`), ask(`api/runs/${name}/curves`)]);
  return () => {
    if (!byId("curves")) {
      view.replaceChildren(make("section", {className: "panel", id: "summary"}), panel("Curves", make("div", {id: "curves", className: "charts"})),
        make("div", {id: "details", className: "charts"}));
    }
    const figures = Object.entries(run.metrics).filter(([, given]) => typeof given === "number").slice(0, 12);
    byId("summary").replaceChildren(
      make("h2", {}, `${run.summary.recipe}: ${name}`), make("p", {}, state(run.summary.status)),
      ...(run.error ? [make("p", {className: "error"}, run.error)] : []),
      make("dl", {className: "figures"}, figures.map(([title, given]) =>
        make("div", {}, make("dt", {}, title), make("dd", {}, words(given))))),
      ...(run.has_page ? [make("p", {}, make("a", {href: `runs/${name}/report.html`}, "Open the report"))] : []));
    byId("curves").parentElement.hidden = run.summary.job !== "train";
    drawCurves(byId("curves"), [name], [curves]);
    const isOpen = byId("details").querySelector("details")?.open ?? false;
    byId("details").replaceChildren(
      ...(run.events.length ? [panel("What happened", table("What happened", ["time, UTC", "what", "step", "details"],
        run.events.map((event) => [time(event.time), event.kind.replaceAll("_", " "), event.step ?? "",
          event.message])))] : []),
      ...(Object.keys(run.artifacts).length ? [panel("Made", table("Made", ["what", "where"], Object.entries(run.artifacts)))] : []),
      panel("Recipe", make("details", {open: isOpen}, make("summary", {}, "Every key"), make("pre", {}, run.recipe_text))));
    return run.summary.status === "running" ? RUN_PERIOD_MS : RUNS_PERIOD_MS;
  };
}

async function showComparison(view, names) {
  const query = new URLSearchParams(names.map((name) => ["run", name]));
  const [found, ...curves] = await Promise.all([ask(`api/compare?${query}`), ...names.map((name) => ask(`api/runs/${name}/curves`))]);
  return () => {
    if (!byId("curves")) {
      view.replaceChildren(make("section", {className: "panel", id: "differences"}),
        make("section", {className: "panel", id: "metrics"}), panel("Curves", make("div", {id: "curves", className: "charts"})));
    }
    const links = found.runs.map(runLink);
    byId("differences").replaceChildren(make("h2", {}, "Differences of the recipes"), found.differences.length
      ? table("Differences of the recipes", ["key", ...links], found.differences.map((each) => [each.key, ...each.values.map(value)]))
      : make("p", {}, "The recipes are the same."));
    drawCurves(byId("curves"), names, curves);
    byId("metrics").replaceChildren(make("h2", {}, "Results"), table("Results", ["figure", ...names],
      [["status", ...found.runs.map((run) => state(run.status))],
        ...found.metrics.map((each) => [each.key, ...each.values.map(value)])]));
    return found.runs.some((run) => run.status === "running") ? RUN_PERIOD_MS : RUNS_PERIOD_MS;
  };
}

async function showModels(view) {
  const versions = await ask("api/models");
  return () => {
    const columns = ["model", "aliases", "precision", "engine", "score", "MB", "created, UTC", "trained by", "compiled by"];
    const from = (job, id) => (id ? make("a", {href: `#/run/${job}/${id}`}, id) : "");
    view.replaceChildren(panel("Models", versions.length
      ? table("Models", columns, versions.map((each) => [`${each.name}/${each.version}`, each.aliases.join(", "),
        each.precision, each.engine, each.score, each.size_mb, time(each.created), from("train", each.train_run),
        from("compile", each.compile_run)]))
      : make("p", {}, "No model is published yet. ", make("code", {}, "rayloom submit compile RECIPE"), " makes one.")));
    return RUNS_PERIOD_MS;
  };
}

/** Show what the address names, and look again after a while. */
async function route(isNew = true) {
  clearTimeout(timer);
  const mine = ++look;
  const [, page = "runs", ...rest] = location.hash.split("/");
  const view = byId("view");
  if (isNew && view.dataset.shown !== location.hash) {
    view.replaceChildren();
    charts.clear();
    view.dataset.shown = location.hash;
  }
  for (const link of document.querySelectorAll("nav a")) {
    link.toggleAttribute("aria-current", link.hash === `#/${page}`);
  }
  const name = decodeURIComponent(rest.join("/"));
  let period = RUNS_PERIOD_MS;
  try {
    const pages = {runs: () => showRuns(view), run: () => showRun(view, name),
      compare: () => showComparison(view, name.split(",")), models: () => showModels(view)};
    const draw = await (pages[page] ?? pages.runs)();
    if (mine !== look) return;
    byId("lock").hidden = true;
    period = draw();
    const about = await ask("api");
    say(about.storage, "good");
    byId("forget").hidden = !about.asks_for_token;
  } catch (error) {
    if (mine !== look) return;
    if (error.locked) return lock(null);
    say(error.message, "bad");
  }
  timer = setTimeout(() => route(false), document.hidden ? 10 * period : period);
}

byId("lock").addEventListener("submit", async (event) => {
  event.preventDefault();
  const answer = await fetch("login", {method: "POST", headers: {Authorization: `Bearer ${byId("token").value.trim()}`}});
  byId("token").value = "";
  if (!answer.ok) return lock((await answer.json()).error);
  route();
});
byId("forget").addEventListener("click", async () => {
  await fetch("logout", {method: "POST"});
  lock(null);
});
addEventListener("hashchange", () => route());
document.addEventListener("visibilitychange", () => { if (!document.hidden) route(false); });
route();
