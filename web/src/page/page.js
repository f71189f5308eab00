// The page of a cluster. What it shows comes from /v1/events; what it does are the POST and PUT
// requests of /v1/openapi.json. A machine's console is a stream of its own. The key is in the part of the address behind the #, which
// browsers do not send, and then in this tab's storage.
"use strict";

// The server says something every 5 s.
const SILENCE = 15000;
const byId = (id) => document.getElementById(id);
const state = { turn: 0, stop: null, trouble: 0, key: null, role: null, overview: null, log: [], chosen: null, last: 0, shows: new Map() };

// An element with properties and children; text is always text.
function make(tag, properties, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties || {})) {
    if (name === "class") element.className = value;
    else if (name === "width") element.style.width = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

const units = ["MiB", "GiB", "TiB", "PiB"];
function size(mib) {
  let unit = 0;
  while (mib >= 1024 && unit < units.length - 1) { mib /= 1024; unit += 1; }
  return `${mib >= 100 || Number.isInteger(mib) ? Math.round(mib) : mib.toFixed(1)} ${units[unit]}`;
}
const rate = (bytes) => bytes < 2 ** 20 ? `${(bytes / 1024).toFixed(1)} KiB/s` : `${size(bytes / 2 ** 20)}/s`;
const count = (number, one, many) => `${number} ${number === 1 ? one : many}`;
const sum = (list, of) => list.reduce((total, item) => total + of(item), 0);
const states = { "lends": "lends", "cordoned": "cordoned", "drained": "drained", "failing": "failing", "no-daemon": "no daemon", "left": "has left" };

// ---- the server

async function request(method, path, body) {
  const headers = { "Authorization": `Bearer ${state.key}` };
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const answer = await fetch(path, { method, headers, body: body === undefined ? undefined : JSON.stringify(body) });
  const value = await answer.json();
  if (!answer.ok) throw Object.assign(new Error(value.error.message), { status: answer.status });
  return value;
}

// What went wrong with an action stays for some seconds.
function trouble(text) {
  status(text, true);
  state.trouble = Date.now() + 6000;
}

function status(text, bad) {
  const element = byId("status");
  if (element.textContent !== text) element.textContent = text;
  element.classList.toggle("bad", Boolean(bad));
}

async function listen() {
  state.stop = new AbortController();
  await stream("/v1/events", state.stop.signal, event, () => { state.last = Date.now(); });
}

// Reads events until the stream ends. `EventSource` could not send the key.
async function stream(path, signal, take, alive) {
  const answer = await fetch(path, { headers: { "Authorization": `Bearer ${state.key}` }, signal });
  if (!answer.ok) {
    const value = await answer.json();
    throw Object.assign(new Error(value.error.message), { status: answer.status });
  }
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    alive?.();
    text += value;
    for (let end; (end = text.indexOf("\n\n")) >= 0; text = text.slice(end + 2)) {
      const lines = text.slice(0, end).split("\n");
      const kind = lines.find((line) => line.startsWith("event: "));
      const data = lines.find((line) => line.startsWith("data: "));
      if (kind && data) take(kind.slice(7), JSON.parse(data.slice(6)));
    }
  }
}

function event(kind, value) {
  switch (kind) {
    case "overview": state.overview = value; said(); draw(); break;
    case "log": state.log = state.log.concat(value).slice(-1000); drawLog(); break;
    case "trouble": status(`The cluster cannot be read: ${value}`, true); break;
  }
}

function said() {
  if (Date.now() < state.trouble) return;
  const { leader, policy, hands_off } = state.overview;
  const who = leader ? `${leader} decides, by ${policy}` : "no host decides: run weft node start on a member";
  status(hands_off ? `${who}; it moves nothing by itself` : who, !leader);
}

async function run(turn) {
  while (turn === state.turn) {
    try {
      const session = await request("GET", "/v1/session");
      state.role = session.role;
      state.log = [];
      byId("cluster").textContent = session.cluster;
      document.title = `${session.cluster} – Weft`;
      byId("login").hidden = true;
      byId("main").hidden = false;
      await listen();
      status("The server has ended the connection: trying again", true);
    } catch (error) {
      if (turn !== state.turn) return;
      if (error.status === 401) return login(error.message);
      status(error.status ? error.message : "The server does not answer: trying again", true);
    }
    await new Promise((wake) => setTimeout(wake, 1000));
  }
}

function login(why) {
  status(why, true);
  byId("main").hidden = true;
  byId("login").hidden = false;
  byId("key").focus();
}

// ---- drawing: a part is drawn again only if it has changed

function draw() {
  const { overview } = state;
  const word = byId("filter").value.trim().toLowerCase();
  const fits = (...texts) => !word || texts.some((text) => text.toLowerCase().includes(word));
  const parts = (run) => run.parts.map((part) => part.host).join(" ");
  const hosts = overview.hosts.filter((host) => fits(host.name, states[host.state]) || overview.runs.some((run) => fits(run.name) && run.parts.some((part) => part.host === host.name)));
  const runs = overview.runs.filter((run) => fits(run.name, run.user, run.kind, parts(run)));
  const waits = overview.waits.filter((wait) => fits(wait.name, wait.user, wait.kind, wait.home));
  show("sum", overview.hosts.concat(overview.runs.length, overview.waits), () => drawSum(overview));
  drawHosts(hosts, overview.runs);
  const lending = overview.hosts.filter((host) => host.state === "lends").map((host) => host.name);
  show("runs", [runs.map((run) => ({ ...run, live: run.live && run.moving ? run.live.moved : null })), state.chosen, state.role, lending], () => [drawRuns(runs)]);
  drawLive(runs.filter((run) => run.live !== null && (state.chosen === null || run.name === state.chosen)));
  byId("s-waits").hidden = overview.waits.length === 0;
  show("waits", waits, () => [drawWaits(waits)]);
  byId("s-next").hidden = overview.next_moves.length === 0;
  show("next", overview.next_moves, () => overview.next_moves.map((next) => make("li", {}, next.why)));
  const button = byId("hands-off");
  button.hidden = state.role !== "run";
  button.textContent = overview.hands_off ? "Let it move machines" : "Hands off";
}

function show(id, value, children) {
  const text = JSON.stringify(value);
  if (state.shows.get(id) === text) return;
  state.shows.set(id, text);
  const element = byId(id);
  const focus = document.activeElement && element.contains(document.activeElement) ? document.activeElement.id : null;
  element.replaceChildren(...children());
  if (focus) byId(focus)?.focus();
}

function drawSum(overview) {
  const { hosts, runs, waits } = overview;
  const living = hosts.filter((host) => host.alive);
  const spread = runs.filter((run) => run.parts.length > 1);
  const item = (name, value, bad) => make("div", {}, make("dt", {}, name), make("dd", { class: bad ? "bad" : "" }, value));
  const free = sum(living, (host) => host.cores_free);
  const stranded = sum(living, (host) => host.cores_stranded);
  const largest = Math.max(0, ...living.map((host) => host.cores_free));
  return [
    item("hosts", `${living.length} of ${hosts.length}`, living.length < hosts.length),
    item("free cores", `${free} of ${sum(living, (host) => host.cores)}`),
    item("largest block", count(largest, "core", "cores")),
    item("stranded", count(stranded, "core", "cores")),
    item("free memory", `${size(sum(living, (host) => host.memory_free_mib))} of ${size(sum(living, (host) => host.memory_mib))}`),
    item("runs", `${runs.length}`),
    item("over several hosts", `${spread.length}`),
    item("waits", `${waits.length}`),
  ];
}

function drawHosts(hosts, runs) {
  const all = byId("hosts");
  const wanted = new Set(hosts.map((host) => `host-${host.name}`));
  for (const child of [...all.children]) {
    if (!wanted.has(child.id)) { child.remove(); state.shows.delete(child.id); }
  }
  const here = new Map(hosts.map((host) => [host.name, []]));
  for (const run of runs) for (const part of run.parts) here.get(part.host)?.push({ run, part });
  hosts.forEach((host, at) => {
    const id = `host-${host.name}`;
    let card = byId(id);
    if (!card) card = make("article", { id, class: "host" });
    if (all.children[at] !== card) all.insertBefore(card, all.children[at] || null);
    show(id, [host, here.get(host.name), state.chosen, state.role], () => drawHost(host, here.get(host.name)));
  });
  if (hosts.length === 0 && !byId("no-hosts")) all.append(make("p", { class: "empty", id: "no-hosts" }, "No host fits the filter."));
  if (hosts.length > 0) byId("no-hosts")?.remove();
}

function drawHost(host, work) {
  const bar = (what, whole, of, free, stranded, format, plain) => {
    const share = (value) => `${whole ? (100 * value) / whole : 0}%`;
    const pieces = work.filter(({ part }) => of(part) > 0).map(({ run, part }) => make("i", {
      class: `used${run.name === state.chosen ? " mine" : ""}`, width: share(of(part)), title: `${run.name}: ${format(of(part))}`,
    }));
    // Free room is the ground of the bar: what is neither used nor free belongs to others.
    if (stranded > 0) pieces.push(make("i", { class: "stranded", width: share(stranded), title: `stranded: ${format(stranded)}` }));
    const label = `${what}: ${plain(free)} of ${format(whole)}`;
    return [make("p", {}, label), make("div", { class: "bar", role: "img", "aria-label": label }, ...pieces)];
  };
  const bad = !host.alive || host.trouble !== null;
  const children = [make("h3", {}, host.name, make("span", { class: bad ? "bad" : host.state === "lends" ? "good" : "" }, states[host.state]))];
  if (host.trouble !== null) children.push(make("p", { class: "bad" }, `Expected to fail: ${host.trouble}.`));
  if (host.alive) {
    const cores = (number) => count(number, "core", "cores");
    children.push(...bar("Free", host.cores, (part) => part.cores, host.cores_free, host.cores_stranded, cores, String));
    children.push(...bar("Free", host.memory_mib, (part) => part.reserved_mib, host.memory_free_mib, 0, size, size));
    const { load, lent_bytes, lends_bytes, slices } = host.report;
    children.push(make("p", {}, `load ${load.toFixed(1)}, has lent ${size(lent_bytes / 2 ** 20)} of ${size(lends_bytes / 2 ** 20)} to ${count(slices, "slice", "slices")}`));
  } else {
    children.push(make("p", { class: "bad" }, `It says nothing: weft node start there, at ${host.address || "its address"}.`));
  }
  if (work.length > 0) children.push(make("p", {}, work.map(({ run }) => run.name).join(", ")));
  if (state.role === "run" && host.state !== "left") {
    const button = (name, word) => make("button", { type: "button", id: `${word}-${host.name}`, onclick: () => act(word, host.name) }, name);
    const buttons = host.cordoned || host.draining || host.trouble !== null ? [button("Uncordon", "uncordon")] : [button("Cordon", "cordon")];
    if (!host.draining) buttons.push(button("Drain", "drain"));
    children.push(make("p", { class: "buttons" }, ...buttons));
  }
  return children;
}

function table(heads, rows, empty) {
  if (rows.length === 0) return make("p", { class: "empty" }, empty);
  return make("table", {}, make("thead", {}, make("tr", {}, ...heads.map((head) => make("th", { scope: "col" }, head)))), make("tbody", {}, ...rows));
}

function mayMove() {
  return state.role === "run" || state.role === "use";
}

function drawRuns(runs) {
  const rows = runs.map((run) => {
    const where = run.parts.map((part) => `${part.host} (${count(part.cores, "core", "cores")}, ${size(part.memory_mib)})`).join(", ");
    const move = run.moving ? run.moving.why : run.failure ? `The last move failed: ${run.failure}.` : null;
    const part = run.moving && run.live ? run.live.moved : null;
    const what = !run.agent ? "agent silent" : !run.moving ? "runs" : run.moving.called_off ? "goes back" : part === null ? "moves" : `moves, ${Math.round(100 * part)} %`;
    const pick = () => { state.chosen = state.chosen === run.name ? null : run.name; draw(); };
    return make("tr", { class: run.name === state.chosen ? "chosen" : "" },
      make("td", { class: "name" }, make("button", { type: "button", id: `run-${run.name}`, "aria-pressed": String(run.name === state.chosen), title: "show where it is", onclick: pick }, run.name)),
      make("td", {}, run.kind), make("td", {}, run.user),
      make("td", { class: run.agent ? "" : "bad" }, what),
      make("td", {}, where, make("small", {}, run.why), move ? make("small", { class: run.moving ? "" : "bad" }, move) : null, run.moving ? drawCancel(run) : run.name === state.chosen ? drawMove(run) : null, run.name === state.chosen ? drawConsole(run) : null),
      make("td", { class: "number" }, run.parts.length > 1 ? `× ${run.slow_down.toFixed(2)}` : "1"));
  });
  return table(["Name", "Kind", "User", "State", "Hosts", "Spread costs"], rows, "Nothing runs in this cluster.");
}

// What calls the open move off.
function drawCancel(run) {
  if (!mayMove() || run.moving.called_off) return null;
  const go = () => change("POST", `/v1/work/${encodeURIComponent(run.name)}/cancel`);
  return make("p", { class: "buttons" }, make("button", { type: "button", id: `cancel-${run.name}`, onclick: go }, "Call the move off"));
}

// Where a part of the chosen machine can go: to another host, or to one that has a part already.
function drawMove(run) {
  if (!mayMove() || run.kind !== "machine") return null;
  const parts = run.parts.filter((part) => part.host !== run.home).map((part) => part.host);
  const hosts = state.overview.hosts.filter((host) => host.state === "lends").map((host) => host.name);
  if (parts.length === 0 || hosts.length < 2) return null;
  const select = (id, label, names) => make("label", {}, `${label} `, make("select", { id }, ...names.map((name) => make("option", { value: name }, name))));
  const go = () => change("POST", `/v1/work/${encodeURIComponent(run.name)}/move`, { from: byId("move-from").value, to: byId("move-to").value });
  return make("p", { class: "buttons" }, select("move-from", "Move the part on", parts), select("move-to", "to", hosts), make("button", { type: "button", id: "move", onclick: go }, "Move"));
}

function drawConsole(run) {
  if (!mayMove() || run.kind !== "machine" || !run.agent) return null;
  return make("p", { class: "buttons" }, make("button", { type: "button", id: "open-console", onclick: () => openConsole(run.name) }, "Console"));
}

// What agents tell while somebody looks: where memory and vCPUs are, and the bytes between hosts.
function drawLive(runs) {
  byId("s-traffic").hidden = runs.length === 0;
  const spread = runs.filter((run) => run.live.hosts.length > 1 || run.name === state.chosen);
  show("live", spread.map((run) => [run.name, run.live.hosts]), () => spread.length === 0 ? [] : [table(
    ["Name", "Host", "Memory", "vCPUs"],
    spread.flatMap((run) => run.live.hosts.map((here) => make("tr", {},
      make("td", { class: "name" }, run.name), make("td", {}, here.host), make("td", { class: "number" }, size(here.memory_bytes / 2 ** 20)),
      make("td", { class: "number" }, here.vcpus === null ? (here.executes ? "executes" : "") : String(here.vcpus))))), "")]);
  const pairs = new Map();
  for (const run of runs) {
    for (const { from, to, bytes_per_s } of run.live.flows) {
      const pair = pairs.get(`${from} ${to}`) || { from, to, rate: 0, of: [] };
      pair.rate += bytes_per_s;
      if (bytes_per_s > 0) pair.of.push(run.name);
      pairs.set(`${from} ${to}`, pair);
    }
  }
  const flows = [...pairs.values()].filter((pair) => pair.rate > 0).sort((one, other) => other.rate - one.rate).slice(0, 50);
  const most = flows.length === 0 ? 1 : flows[0].rate;
  show("traffic", flows, () => [table(["From", "To", "Traffic", "", "Of"], flows.map((flow) => make("tr", {},
    make("td", {}, flow.from), make("td", {}, flow.to), make("td", { class: "number" }, rate(flow.rate)),
    make("td", { class: "wide" }, make("div", { class: "bar", role: "img", "aria-label": `${Math.round(100 * flow.rate / most)} % of the largest` }, make("i", { class: "used", width: `${100 * flow.rate / most}%` }))),
    make("td", {}, flow.of.slice(0, 3).join(", ") + (flow.of.length > 3 ? ` and ${flow.of.length - 3} more` : "")))), "Nothing goes between hosts now.")]);
}

function drawWaits(waits) {
  const rows = waits.map((wait) => make("tr", {},
    make("td", { class: "name" }, wait.name), make("td", {}, wait.kind), make("td", {}, wait.user),
    make("td", {}, `${count(wait.cores, "core", "cores")}, ${size(wait.memory_mib)}`), make("td", {}, wait.why)));
  return table(["Name", "Kind", "User", "Wants", "Why"], rows, "Nothing fits the filter.");
}

function drawLog() {
  const word = byId("filter").value.trim().toLowerCase();
  const records = state.log.filter((record) => !word || record.what.toLowerCase().includes(word)).slice(-300).reverse();
  const rows = records.map((record) => make("tr", {},
    make("td", { class: "name" }, new Date(record.at * 1000).toLocaleTimeString()),
    make("td", { class: record.kind === "fail" || record.kind === "refuse" ? "bad" : "" }, record.kind),
    make("td", {}, record.what)));
  byId("log").replaceChildren(table(["Time", "What", ""], rows, "Nothing has happened yet."));
}

// ---- doing

function confirm(title, text, yes) {
  const dialog = byId("ask");
  byId("ask-title").textContent = title;
  byId("ask-text").textContent = text;
  byId("ask-yes").textContent = yes;
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((done) => {
    dialog.addEventListener("close", function closed() {
      // The event of an earlier question comes late.
      if (dialog.open) return;
      dialog.removeEventListener("close", closed);
      done(dialog.returnValue === "yes");
    });
  });
}

async function change(method, path, body) {
  try {
    await request(method, path, body);
  } catch (error) {
    trouble(error.message);
  }
}

// ---- a machine's console

// What a terminal shows of what it gets: lines of text. Colours are left out, and the cursor moves
// within its line only.
class Terminal {
  constructor(element) { this.element = element; this.lines = [""]; this.at = 0; this.rest = ""; this.decoder = new TextDecoder(); this.draw(); }

  write(bytes) {
    const text = this.rest + this.decoder.decode(bytes, { stream: true });
    this.rest = "";
    // An escape sequence, a control character, or text.
    const pieces = /\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[()#][ -~]|[0-Z\\^-~])|[\x00-\x1f\x7f]|[^\x00-\x1f\x7f]+/gy;
    for (let last = 0, piece; last < text.length; last = pieces.lastIndex) {
      pieces.lastIndex = last;
      piece = pieces.exec(text);
      // An escape sequence whose end has not come yet; a long one is none.
      if (piece[0] === "\x1b" && text.length - last < 200) { this.rest = text.slice(last); break; }
      this.take(piece[0]);
    }
    this.draw();
  }

  take(piece) {
    const last = this.lines.length - 1;
    const line = this.lines[last];
    const number = () => parseInt(piece.slice(2), 10) || 1;
    if (piece === "\n") { this.lines.push(""); this.at = 0; if (this.lines.length > 1000) this.lines.shift(); }
    else if (piece === "\r") this.at = 0;
    else if (piece === "\b") this.at = Math.max(0, this.at - 1);
    else if (piece === "\t") this.put(" ".repeat(8 - this.at % 8));
    else if (/^\x1b\[0?K$/.test(piece)) this.lines[last] = line.slice(0, this.at);
    else if (/^\x1b\[0?J$/.test(piece)) this.lines[last] = line.slice(0, this.at);
    else if (/^\x1b\[\d*P$/.test(piece)) this.lines[last] = line.slice(0, this.at) + line.slice(this.at + number());
    else if (/^\x1b\[\d*C$/.test(piece)) this.at += number();
    else if (/^\x1b\[\d*D$/.test(piece)) this.at = Math.max(0, this.at - number());
    else if (piece === "\x1b[2J" || piece === "\x1bc") { this.lines = [""]; this.at = 0; }
    else if (piece >= " " && piece[0] !== "\x7f") this.put(piece);
  }

  put(text) {
    const last = this.lines.length - 1;
    const line = this.lines[last].padEnd(this.at);
    this.lines[last] = line.slice(0, this.at) + text + line.slice(this.at + text.length);
    this.at += text.length;
  }

  draw() {
    const atEnd = this.element.scrollTop + this.element.clientHeight >= this.element.scrollHeight - 20;
    const last = this.lines[this.lines.length - 1];
    this.element.textContent = this.lines.slice(0, -1).concat(last.slice(0, this.at).padEnd(this.at) + "\u2581" + last.slice(this.at + 1)).join("\n");
    if (atEnd) this.element.scrollTop = this.element.scrollHeight;
  }
}

const opened = { name: null, stop: null, typed: "", sending: false };

async function openConsole(name) {
  closeConsole();
  const stop = new AbortController();
  Object.assign(opened, { name, stop });
  byId("s-console").hidden = false;
  byId("h-console").textContent = `Console of ${name}`;
  const say = (text) => { byId("console-said").textContent = text; };
  say("Waiting for the machine…");
  const terminal = new Terminal(byId("console"));
  byId("console").focus();
  byId("s-console").scrollIntoView({ block: "nearest" });
  try {
    await stream(`/v1/work/${encodeURIComponent(name)}/console`, stop.signal, (kind, value) => {
      if (kind === "output") { say(""); terminal.write(Uint8Array.from(atob(value), (letter) => letter.charCodeAt(0))); }
      if (kind === "closed") say(`Closed: ${value}.`);
    });
  } catch (error) {
    if (!stop.signal.aborted) say(error.message);
  }
}

function closeConsole() {
  opened.stop?.abort();
  Object.assign(opened, { name: null, stop: null, typed: "" });
  byId("s-console").hidden = true;
}

const keys = { Enter: "\r", Backspace: "\x7f", Tab: "\t", Escape: "\x1b", ArrowUp: "\x1b[A", ArrowDown: "\x1b[B", ArrowRight: "\x1b[C", ArrowLeft: "\x1b[D", Home: "\x1b[H", End: "\x1b[F", Delete: "\x1b[3~", PageUp: "\x1b[5~", PageDown: "\x1b[6~" };

// What a key sends; null: it is the browser's.
function sends(pressed) {
  if (pressed.altKey || pressed.metaKey || pressed.shiftKey && pressed.key === "Tab") return null;
  if (pressed.ctrlKey) return /^[a-z\[\\]$/.test(pressed.key) ? String.fromCharCode(pressed.key.charCodeAt(0) & 31) : null;
  return keys[pressed.key] ?? ([...pressed.key].length === 1 ? pressed.key : null);
}

// One request at a time: what is typed meanwhile goes with the next.
async function type(text) {
  opened.typed += text;
  if (opened.sending) return;
  opened.sending = true;
  while (opened.typed && opened.name) {
    const typed = opened.typed.slice(0, 1000);
    opened.typed = opened.typed.slice(typed.length);
    await change("POST", `/v1/work/${encodeURIComponent(opened.name)}/console`, { typed });
  }
  opened.sending = false;
}

byId("console").addEventListener("keydown", (pressed) => {
  if (pressed.ctrlKey && pressed.key === "]") { pressed.preventDefault(); byId("console-close").focus(); return; }
  const text = sends(pressed);
  if (text === null) return;
  pressed.preventDefault();
  pressed.stopPropagation();
  type(text);
});
byId("console").addEventListener("paste", (pasted) => type(pasted.clipboardData.getData("text").replaceAll("\n", "\r")));
byId("console-close").addEventListener("click", () => { closeConsole(); byId("open-console")?.focus(); });

async function act(word, host) {
  const here = state.overview.runs.filter((run) => run.parts.some((part) => part.host === host)).map((run) => run.name);
  const fixed = state.overview.runs.filter((run) => run.parts.some((part) => part.host === host) && run.home === host).map((run) => run.name);
  if (word === "drain") {
    const stays = fixed.length ? ` Not able to move, so it stays until it ends: ${fixed.join(", ")}.` : "";
    const leaves = here.filter((name) => !fixed.includes(name));
    const text = here.length ? `Leaves ${host}: ${leaves.join(", ") || "nothing"}.${stays}` : `Nothing is on ${host}; nothing new comes.`;
    if (!await confirm(`Drain ${host}?`, text, "Drain")) return;
  }
  await change("POST", `/v1/hosts/${encodeURIComponent(host)}/${word}`);
}

byId("hands-off").addEventListener("click", () => change("PUT", "/v1/hands-off", { hands_off: !state.overview.hands_off }));
byId("filter").addEventListener("input", () => { if (state.overview) draw(); drawLog(); });
document.addEventListener("keydown", (pressed) => {
  const typing = document.activeElement instanceof HTMLInputElement || document.activeElement === byId("console");
  if (pressed.key === "/" && !typing) { pressed.preventDefault(); byId("filter").focus(); }
  if (pressed.key === "Escape" && document.activeElement === byId("filter")) { byId("filter").value = ""; byId("filter").dispatchEvent(new Event("input")); }
});
byId("login").addEventListener("submit", (submitted) => {
  submitted.preventDefault();
  start(byId("key").value.trim());
});

function start(key) {
  state.key = key;
  state.turn += 1;
  state.stop?.abort();
  sessionStorage.setItem("weft-key", key);
  status("Connecting…");
  run(state.turn);
}

// The key in a link leaves the address bar and the history.
function given() {
  const key = location.hash.slice(1);
  if (key) history.replaceState(null, "", location.pathname);
  return key;
}

// Another link was opened in this tab.
window.addEventListener("hashchange", () => {
  const key = given();
  if (key) start(key);
});
const key = given() || sessionStorage.getItem("weft-key");
if (key) start(key); else login("Not connected");
setInterval(() => {
  if (!state.last || Date.now() - state.last < SILENCE) return;
  status("The server is silent: connecting again", true);
  state.last = Date.now();
  state.stop?.abort();
}, 1000);
