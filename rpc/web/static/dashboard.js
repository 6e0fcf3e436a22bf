// Looks at the server each second and draws what it says. Everything that comes from there is put in as text.
"use strict";

const INTERVAL = 1000; // ms between two looks
const PATIENCE = 10; // seconds for a look; a prompt may take as long as it takes
const KEPT = 300; // seconds in a chart
const STATES = { "#": "held", o: "cached", ".": "free", "!": "wrong" }; // of pages, by their colors in dashboard.css
const LOWEST = 3, HIGHEST = 14, MAP_HEIGHT = 240; // pixels: of a page's square, and of a map
const at = (id) => document.getElementById(id);
let token = ""; // in memory alone: who loads the page again gives it again
let rates = [];
let run = ""; // of the server: whose rates and maps these are
const maps = new Map(); // by engine: what was drawn

class Refused extends Error {}

async function ask(path, options = {}) {
  const headers = { ...options.headers, ...(token ? { authorization: `Bearer ${token}` } : {}) };
  const answer = await fetch(path, { ...options, headers, credentials: "omit", cache: "no-store" });
  if (answer.ok) return answer;
  const message = await answer.json().then((body) => body.error.message, () => answer.statusText);
  if (answer.status === 401) throw new Refused("that is no token of this server");
  throw answer.status === 403 ? new Refused(message) : new Error(message);
}

// Looking

async function looked(path) {
  try {
    return await (await ask(path, { signal: AbortSignal.timeout(PATIENCE * 1000) })).json();
  } catch (error) {
    throw error.name === "TimeoutError" ? new Error(`no answer within ${PATIENCE} s`) : error;
  }
}

async function look() {
  try {
    const after = rates.length ? rates[rates.length - 1].number : 0;
    let state = await looked(`api/state?after=${after}`);
    if (state.run !== run) {
      // Another server's: it counts from 1 again, and nothing that is known is of it.
      run = state.run;
      rates = [];
      maps.clear();
      if (after) state = await looked("api/state?after=0");
    }
    open_(true);
    show(state);
    const cards = [...at("engines").children];
    await Promise.all(state.load.replicas.map((engine, place) => lookAtPages(engine, cards[place])));
    at("status").textContent = `up ${span(seconds(state.load.uptime))}`;
    at("status").className = "";
  } catch (error) {
    if (error instanceof Refused) return refuse(error.message);
    at("status").textContent = `away: ${error.message}`;
    at("status").className = "away";
  }
  setTimeout(look, INTERVAL);
}

function open_(inside) {
  at("main").hidden = !inside;
  at("login").hidden = inside;
}

function refuse(message) {
  at("refused").textContent = token ? message : "";
  at("model").textContent = at("status").textContent = "";
  token = "";
  open_(false);
  at("token").focus();
}

at("login").addEventListener("submit", (event) => {
  event.preventDefault();
  token = at("token").value.trim();
  at("token").value = "";
  if (!/^[!-~]+$/.test(token)) return refuse("a token is of visible ASCII characters"); // no header could carry it
  rates = [];
  look();
});

// Showing

const seconds = (text) => Number.parseFloat(text); // "1.5s"
const count = (value) => Number(value).toLocaleString("en");
const lower = (name, prefix) => name.slice(prefix.length).toLowerCase();

function span(value) {
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 60) return `${value.toFixed(1)} s`;
  const minutes = Math.floor(value / 60);
  return minutes < 60 ? `${minutes} min ${Math.floor(value % 60)} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

function show(state) {
  const { info, load } = state;
  rates = [...rates, ...state.rates].slice(-KEPT);
  at("model").textContent = `${info.model}: ${info.architecture}, ${info.dtype} on ${info.device}, ${count(info.max_model_length)} tokens`;
  at("chat_label").hidden = !state.chat;
  const now = rates[rates.length - 1];
  at("generated").textContent = now ? count(Math.round(now.generated)) : "-";
  at("prompted").textContent = now ? count(Math.round(now.prompt)) : "-";
  const first = rates.findLast((one) => one.ttft !== null);
  at("ttft").textContent = first ? (first.ttft * 1000).toFixed(first.ttft < 0.1 ? 1 : 0) : "-";
  at("live").textContent = count(load.request_count);
  at("waiting").textContent = count(load.tenants.reduce((sum, one) => sum + one.waiting_count, 0));
  const prompts = Number(load.prompt_tokens_total);
  at("cached").textContent = prompts ? `${Math.round((100 * Number(load.cached_prompt_tokens_total)) / prompts)} %` : "-";
  chart(at("throughput"), [[rates.map((one) => one.prompt), "cached"], [rates.map((one) => one.generated), "held"]]);
  chart(at("waits"), [[rates.map((one) => (one.ttft === null ? null : one.ttft * 1000)), "ttft"]]);
  engines(load.replicas);
  rows(at("tenants"), load.tenants.map((one) => [one.tenant, count(one.request_count), count(one.waiting_count), count(one.tokens)]));
  const { requests, total_count } = state.requests;
  at("total").textContent = total_count ? `${requests.length} of ${count(total_count)}` : "";
  showRecorded(state.records);
  rows(at("requests"), requests.map((one) => [
    one.request_id, one.tenant, lower(one.state, "REQUEST_STATE_"), one.replica ?? "-", one.age ? span(seconds(one.age)) : "-",
    count(one.prompt_tokens), count(one.completion_tokens),
  ]));
}

function made(name, className = "", text = "") {
  const element = document.createElement(name);
  element.className = className;
  element.textContent = text;
  return element;
}

function rows(table, lines) {
  table.tBodies[0].replaceChildren(...lines.map((cells) => {
    const row = made("tr");
    row.append(...cells.map((cell) => made("td", "", cell)));
    return row;
  }));
}

function engines(replicas) {
  const holder = at("engines");
  while (holder.children.length > replicas.length) holder.lastChild.remove();
  while (holder.children.length < replicas.length) {
    const card = made("section", "card engine");
    card.append(made("h2"), made("p", "facts"), made("canvas", "map"), made("p", "counts"));
    holder.append(card);
  }
  replicas.forEach((one, place) => {
    const [heading, facts] = holder.children[place].children;
    const state = lower(one.state, "REPLICA_STATE_");
    heading.replaceChildren(`KV pages of engine ${one.number}`, made("span", `state ${state}`, state));
    const parts = [["running", one.running], ["waiting", one.waiting], ["epoch", one.epoch]];
    facts.replaceChildren(...parts.map(([name, value]) => {
      const part = made("span", "", `${name} `);
      part.append(made("b", "", count(value)));
      return part;
    }), made("span", "", one.place));
  });
}

// Charts and maps

// A variable of dashboard.css, which has other values in a light theme.
const styled = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

function prepared(canvas, height) {
  const scale = window.devicePixelRatio || 1, width = canvas.clientWidth;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  const drawing = canvas.getContext("2d");
  drawing.setTransform(scale, 0, 0, scale, 0, 0);
  drawing.clearRect(0, 0, width, height);
  return [drawing, width];
}

function chart(canvas, lines) {
  const height = 130, left = 44, bottom = height - 16, top = 8;
  const [drawing, width] = prepared(canvas, height);
  const most = round(Math.max(1, ...lines.flatMap(([values]) => values).filter((value) => value !== null)));
  const x = (back) => width - 2 - (back * (width - left - 2)) / (KEPT - 1);
  const y = (value) => bottom - (value / most) * (bottom - top);
  drawing.font = "11px system-ui, sans-serif";
  drawing.fillStyle = styled("dim");
  drawing.strokeStyle = styled("line");
  drawing.textAlign = "right";
  for (const value of [0, most / 2, most]) {
    drawing.fillText(count(value), left - 8, y(value) + 4);
    drawing.beginPath();
    drawing.moveTo(left, y(value) + 0.5);
    drawing.lineTo(width, y(value) + 0.5);
    drawing.stroke();
  }
  drawing.fillText("now", width, height - 2);
  drawing.textAlign = "left";
  drawing.fillText(`${KEPT / 60} min ago`, left, height - 2);
  for (const [values, colour] of lines) {
    drawing.strokeStyle = drawing.fillStyle = styled(colour);
    for (const [start, end] of stretches(values)) {
      const points = values.slice(start, end).map((value, i) => [x(values.length - 1 - start - i), y(value)]);
      trace(drawing, points, bottom);
    }
  }
}

// Where values are, as [start, end) of each stretch without a null: no line leads over seconds in which nothing came.
function stretches(values) {
  const found = [];
  values.forEach((value, i) => {
    if (value === null) return;
    if (i && values[i - 1] !== null) found[found.length - 1][1] = i + 1;
    else found.push([i, i + 1]);
  });
  return found;
}

// A line over a shaded area; a second alone is a dot.
function trace(drawing, points, bottom) {
  const [[began], [ended, last]] = [points[0], points[points.length - 1]];
  drawing.beginPath();
  if (points.length === 1) {
    drawing.arc(ended, last, 1.5, 0, 2 * Math.PI);
    drawing.fill();
    return;
  }
  for (const point of points) drawing.lineTo(...point);
  drawing.lineWidth = 1.5;
  drawing.stroke();
  drawing.lineWidth = 1;
  drawing.lineTo(ended, bottom);
  drawing.lineTo(began, bottom);
  drawing.globalAlpha = 0.15;
  drawing.fill();
  drawing.globalAlpha = 1;
}

// The next of 1, 2, 5, 10 ...
function round(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 5, 10].find((step) => step * power >= value);
}

// Each engine's for itself: one that is stuck takes nothing from the others, and no old map stands for its pages of now.
async function lookAtPages(engine, card) {
  const [, , canvas, counts] = card.children;
  try {
    if (engine.state === "REPLICA_STATE_STARTING") throw new Error("it starts");
    const pages = await looked(`api/pages/${engine.number}`);
    canvas.hidden = false;
    showPages(engine, pages, canvas, counts);
  } catch (error) {
    canvas.hidden = true;
    maps.delete(engine.number);
    counts.textContent = `no page map: ${error.message}`;
  }
}

function showPages(engine, { states, page_size }, canvas, counts) {
  const number = { "#": 0, o: 0, ".": 0, "!": 0 };
  for (const state of states) number[state]++;
  const shown = [["held", "#"], ["cached", "o"], ["free", "."], ...(number["!"] ? [["set aside", "!"]] : [])];
  const keys = shown.map(([name, state]) => made("span", `key ${name}`, `${count(number[state])} ${name}`));
  counts.replaceChildren(...keys, ` of ${count(states.length)} pages of ${page_size} tokens`);
  map(canvas, states, maps.get(engine.number) ?? states);
  maps.set(engine.number, states);
}

// A square for each page, or for several where there are too many. What has changed since the last look stands out.
function map(canvas, states, before) {
  const width = canvas.clientWidth;
  const fits = (size) => Math.ceil(states.length / Math.floor(width / size)) * size <= MAP_HEIGHT;
  let size = HIGHEST;
  while (size > LOWEST && !fits(size)) size--;
  const columns = Math.max(1, Math.floor(width / size));
  const each = fits(size) ? 1 : Math.ceil(states.length / (columns * Math.floor(MAP_HEIGHT / size)));
  const cells = Math.ceil(states.length / each);
  const height = Math.ceil(cells / columns) * size;
  canvas.style.height = `${height}px`;
  const [drawing] = prepared(canvas, height);
  const gap = size > 5 ? 2 : 1, changed = Number(styled("changed"));
  const parts = (name) => styled(name).match(/[0-9a-f]{2}/g).map((part) => Number.parseInt(part, 16));
  const colours = Object.fromEntries(Object.entries(STATES).map(([state, name]) => [state, parts(name)]));
  for (let cell = 0; cell < cells; cell++) {
    const pages = states.slice(cell * each, (cell + 1) * each), old = before.slice(cell * each, (cell + 1) * each);
    const colour = [0, 0, 0];
    for (const state of pages) colours[state].forEach((part, i) => (colour[i] += part / pages.length));
    const shift = pages === old ? 0 : changed;
    drawing.fillStyle = `rgb(${colour.map((part) => Math.min(255, Math.max(0, Math.round(part + shift)))).join(" ")})`;
    drawing.fillRect((cell % columns) * size, Math.floor(cell / columns) * size, size - gap, size - gap);
  }
}

// Asking

let asking = null;
at("stop").addEventListener("click", () => asking?.abort());
at("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) at("ask").requestSubmit();
});

at("ask").addEventListener("submit", async (event) => {
  event.preventDefault();
  if (asking) return;
  asking = new AbortController();
  at("send").disabled = !(at("stop").disabled = false);
  at("summary").textContent = at("summary").className = "";
  const answer = at("answer"), began = performance.now();
  answer.replaceChildren(made("span", "asked", at("prompt").value + (wanted().chat ? "\n" : "")));
  try {
    await stream(wanted(), answer, began);
  } catch (error) {
    const stopped = error.name === "AbortError";
    at("summary").textContent = stopped ? "stopped" : error.message;
    at("summary").className = stopped ? "" : "wrong";
  }
  asking = null;
  at("send").disabled = !(at("stop").disabled = true);
});

function wanted() {
  const given = { prompt: at("prompt").value };
  if (!at("chat_label").hidden && at("chat").checked) given.chat = true;
  for (const name of ["max_tokens", "temperature"]) if (at(name).value !== "") given[name] = Number(at(name).value);
  if (at("seed").value !== "") given.seed = at("seed").value; // of 64 bits, a number has 53
  return given;
}

async function stream(given, answer, began) {
  const headers = { "content-type": "application/json" };
  const got = await ask("api/generate", { method: "POST", headers, body: JSON.stringify(given), signal: asking.signal });
  const reader = got.body.pipeThrough(new TextDecoderStream()).getReader();
  const completion = made("span", "completion");
  answer.append(completion);
  let rest = "", first = 0, last = null;
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      const part = JSON.parse(line);
      if (part.error) throw new Error(part.error.message);
      if (part.text === undefined) last = part;
      else {
        first ||= performance.now();
        completion.append(part.text); // a string becomes a text node
      }
    }
    answer.scrollTop = answer.scrollHeight;
  }
  if (!last) throw new Error("the answer broke off");
  const now = performance.now(), rate = (last.completion_tokens - 1) / ((now - first) / 1000);
  at("summary").textContent =
    `${last.prompt_tokens} prompt tokens (${last.cached_prompt_tokens} cached), ${last.completion_tokens} generated` +
    (Number.isFinite(rate) && rate > 0 ? `, ${rate.toFixed(1)} tokens/s` : "") +
    (first ? `, first after ${span((first - began) / 1000)}` : "") + `, ${last.finish}, seed ${last.seed}`;
}

// Recorded requests

const MOST_INTERVALS = 200; // rows of the table
const PHASES = { // by their colors in dashboard.css
  queued: "pending", held: "free-key", preempted: "wrong", "sat out": "dim", recompute: "ttft", prefill: "cached", decode: "held",
};
const LINE = 22; // pixels of a phase
let records = []; // the list that is shown
let listed = ""; // the run whose list that is
let explaining = null;
let timeline = null; // the one that is shown

at("list").addEventListener("click", list);
at("records").addEventListener("click", (event) => {
  if (event.target.tagName === "BUTTON") explain(records[event.target.closest("tr").sectionRowIndex]);
});

function showRecorded(there) {
  at("recorded").hidden = !there;
  if (there && listed !== run) {
    listed = run;
    explaining?.abort();
    say("");
    list();
  }
  if (timeline) drawPhases(at("phases"), timeline);
}

// What stands below the list. Without a timeline none is shown.
function say(text, found = null, wrong = false) {
  timeline = found;
  at("timeline").hidden = !found;
  at("explained").textContent = text;
  at("explained").className = wrong ? "wrong" : "";
}

async function list() {
  try {
    records = (await looked("api/recorded")).requests;
  } catch (error) {
    return say(error.message, null, true);
  }
  rows(at("records"), records.map((one) => [
    "", one.tenant, one.outcome ?? "live", one.seconds.toFixed(3), count(one.prompt_tokens), count(one.completion_tokens),
  ]));
  [...at("records").tBodies[0].rows].forEach((row, place) => {
    const button = made("button", "", records[place].request_id);
    button.type = "button";
    row.cells[0].append(button);
  });
}

async function explain(one) {
  explaining?.abort();
  const mine = (explaining = new AbortController());
  say(`${one.request_id}: its engine's recording is replayed ...`);
  try {
    // Without a time limit here: the server has one.
    const found = await (await ask(`api/recorded/${one.attempt}`, { signal: mine.signal })).json();
    if (mine === explaining) showTimeline(one, found);
  } catch (error) {
    if (mine === explaining) say(`${one.request_id}: ${error.message}`, null, true);
  }
}

const exact = (nanoseconds) => (nanoseconds / 1e9).toFixed(3);
const lasted = (interval) => interval.end_ns - interval.start_ns;

function showTimeline(one, found) {
  const split = Object.entries(found.split_ns).filter(([, spent]) => spent).map(([phase, spent]) => `${phase} ${exact(spent)} s`);
  const shown = found.intervals.length > MOST_INTERVALS
    ? [...found.intervals].sort((a, b) => lasted(b) - lasted(a)).slice(0, MOST_INTERVALS).sort((a, b) => a.start_ns - b.start_ns)
    : found.intervals;
  const left = found.intervals.length - shown.length, differs = found.differs_at_step;
  const end = found.ended ?? (differs === null ? "still live" : `the replay differs from the recording at step ${count(differs)},`);
  say(
    `${one.request_id}: ${end} after ${exact(found.latency_ns)} s in the engine: ${split.join(", ")}; ` +
    `request ${found.request} of ${found.recording}` + (left ? `; ${count(left)} shorter intervals are drawn and not listed` : ""),
    found,
  );
  const names = new Map(records.map((known) => [String(known.attempt), known.request_id]));
  rows(at("intervals"), shown.map((interval) => [
    exact(interval.start_ns - found.submitted_ns), exact(lasted(interval)), interval.phase, interval.steps || "-", interval.tokens || "-",
    why(interval, names),
  ]));
  drawPhases(at("phases"), found);
}

function why(interval, names) {
  const named = (numbers) => {
    const few = numbers.slice(0, 8).map((number) => names.get(String(number)) ?? `request ${number}`).join(", ");
    return few + (numbers.length > 8 ? ` and ${count(numbers.length - 8)} more` : "");
  };
  const longest = (spent) => Object.entries(spent).sort((a, b) => b[1] - a[1]);
  const parts = longest(interval.lacks_ns).map(([lack, spent]) => `${lack} (${exact(spent)} s)`);
  if (interval.preempted_by.length) parts.unshift(`its pages went to ${named(interval.preempted_by)}`);
  if (interval.preempted_for.length) parts.unshift(`cause: ${interval.preempted_for.join(", ")}`);
  const behind = longest(interval.behind_ns).map(([number]) => number);
  if (behind.length) parts.push(`behind ${named(behind)}`);
  return parts.join("; ");
}

// A line for each phase that the request was in, over its time in the engine.
function drawPhases(canvas, { intervals, submitted_ns, latency_ns }) {
  const lines = Object.keys(PHASES).filter((phase) => intervals.some((interval) => interval.phase === phase));
  const left = 84, height = lines.length * LINE + 18;
  canvas.style.height = `${height}px`;
  const [drawing, width] = prepared(canvas, height);
  const x = (moment) => left + ((moment - submitted_ns) / (latency_ns || 1)) * (width - left - 2);
  drawing.font = "11px system-ui, sans-serif";
  lines.forEach((phase, line) => {
    drawing.fillStyle = styled("dim");
    drawing.textAlign = "right";
    drawing.fillText(phase, left - 8, line * LINE + 15);
    drawing.fillStyle = styled("line");
    drawing.fillRect(left, line * LINE + LINE - 1, width - left, 1);
    drawing.fillStyle = styled(PHASES[phase]);
    for (const interval of intervals) {
      if (interval.phase !== phase) continue;
      // What is shorter than a pixel is seen too.
      drawing.fillRect(x(interval.start_ns), line * LINE + 4, Math.max(1, x(interval.end_ns) - x(interval.start_ns)), LINE - 9);
    }
  });
  drawing.fillStyle = styled("dim");
  drawing.textAlign = "left";
  drawing.fillText("0", left, height - 3);
  drawing.textAlign = "right";
  drawing.fillText(`${exact(latency_ns)} s`, width, height - 3);
}

look();
