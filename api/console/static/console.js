// The console's only script: curves that move while a run trains, values under the pointer, zoom, and the playground.
"use strict";

// A note above a part that shows old values; an empty text removes it.
function note(part, text) {
  const shown = part.querySelector(":scope > .stale");
  if ((shown ? shown.textContent : "") === text) return;
  if (shown) shown.remove();
  if (!text) return;
  const made = document.createElement("p");
  made.className = "notice bad stale";
  made.setAttribute("role", "status");
  made.textContent = text;
  part.prepend(made);
}
// A part with `data-live` is fetched again and again. The server answers 204 while nothing has changed.
function watch(part) {
  const pause = Number(part.dataset.pause || 2000);
  const look = async (wait) => {
    await new Promise((done) => setTimeout(done, wait));
    if (!part.isConnected) return;
    if (document.hidden) return look(pause);
    const began = performance.now();
    try {
      const url = `${part.dataset.live}${part.dataset.live.includes("?") ? "&" : "?"}seen=${encodeURIComponent(part.dataset.seen)}`;
      const answer = await fetch(url, { headers: { accept: "text/html" } });
      if (answer.status === 401) return note(part, "These values are old: your sign-in has ended. Reload the page.");
      if (answer.status === 404) return note(part, "These values are old: this no longer exists.");
      note(part, answer.ok ? "" : `These values are old: the server answers ${answer.status}.`);
      if (answer.status === 200 && !part.querySelector(".picked")) { // a chart stays while a range of it is selected
        const fresh = document.createRange().createContextualFragment(await answer.text()).firstElementChild;
        part.replaceWith(fresh);
        if (fresh.dataset.live) watch(fresh);
        return;
      }
    } catch (error) {
      console.info("the console cannot be reached", error);
      note(part, "These values are old: the server cannot be reached.");
    }
    // What takes the server long is asked for less often.
    look(Math.max(pause, 10 * (performance.now() - began)));
  };
  look(pause);
}
document.querySelectorAll("[data-live]").forEach(watch);

// The values of a chart at the pointer's place.
function at(points, x) {
  let low = 0, high = points.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (points[middle][0] < x) low = middle + 1; else high = middle;
  }
  return low > 0 && x - points[low - 1][0] < points[low][0] - x ? points[low - 1] : points[low];
}
// The place on the x axis that the pointer is at.
function pointed(figure, data, event) {
  const svg = figure.querySelector("svg"), place = svg.getBoundingClientRect(), [left, , right] = data.box;
  const units = (event.clientX - place.left) / place.width * svg.viewBox.baseVal.width;
  return data.x[0] + (Math.min(Math.max(units, left), right) - left) / (right - left) * (data.x[1] - data.x[0]);
}
document.addEventListener("pointermove", (event) => {
  const figure = event.target instanceof Element && event.target.closest("figure[data-chart]");
  document.querySelectorAll("figure[data-chart] output:not([hidden])").forEach((shown) => {
    if (shown.parentElement === figure) return;
    shown.hidden = true;
    shown.parentElement.querySelector(".cross").setAttribute("d", "");
  });
  if (!figure) return;
  const data = JSON.parse(figure.dataset.chart);
  const [left, top, right, bottom] = data.box;
  const x = pointed(figure, data, event);
  const shown = data.lines.filter((line) => line.points.length).map((line) => [line.name, at(line.points, x)]);
  if (!shown.length) return;
  const nearest = shown[0][1][0];
  const across = left + (nearest - data.x[0]) / (data.x[1] - data.x[0]) * (right - left);
  figure.querySelector(".cross").setAttribute("d", `M${across} ${top}V${bottom}`);
  const lines = shown.map(([name, point]) => `${name}  ${Number(point[1].toPrecision(5))}`);
  const output = figure.querySelector("output");
  output.textContent = [`${data.across} ${nearest}`, ...lines].join("\n");
  output.hidden = false;
});

// A range of x that is selected with the pointer is drawn again alone, from means over fewer steps.
document.addEventListener("pointerdown", (event) => {
  const svg = event.target instanceof Element && event.target.closest("figure[data-chart] svg");
  const figure = svg && svg.parentElement, data = svg && JSON.parse(figure.dataset.chart);
  if (!svg || !data.zooms || event.button || event.pointerType === "touch") return;
  event.preventDefault();
  const from = pointed(figure, data, event), [left, top, right, bottom] = data.box;
  const across = (x) => left + (x - data.x[0]) / (data.x[1] - data.x[0]) * (right - left);
  const picked = document.createElementNS(svg.namespaceURI, "path");
  picked.setAttribute("class", "picked");
  svg.append(picked);
  const move = (moved) => picked.setAttribute("d", `M${across(from)} ${top}H${across(pointed(figure, data, moved))}V${bottom}H${across(from)}Z`);
  document.addEventListener("pointermove", move);
  const end = (released) => {
    for (const kind of ["pointerup", "pointercancel"]) document.removeEventListener(kind, end);
    document.removeEventListener("pointermove", move);
    picked.remove();
    if (released.type === "pointercancel") return;
    const [low, high] = [from, pointed(figure, data, released)].sort((a, b) => a - b);
    if (across(high) - across(low) < 4) return;
    const places = figure.closest("[data-places]");
    const runs = places ? JSON.parse(places.dataset.places) : [];
    const step = (x, choose) => (places ? choose(...runs.map((run) => at(run, x)[1])) : choose === Math.min ? Math.ceil(x) : Math.floor(x));
    const url = new URL(location.href), first = step(low, Math.min), last = step(high, Math.max);
    if (first > last) return; // the range lies between two steps
    url.searchParams.set("first", first);
    url.searchParams.set("last", last);
    location.assign(url);
  };
  for (const kind of ["pointerup", "pointercancel"]) document.addEventListener(kind, end);
});
document.querySelectorAll("form[data-auto]").forEach((form) => form.addEventListener("change", () => form.requestSubmit()));

// The playground: one or two models answer the same message, each as its events come.
const playground = document.getElementById("playground");
if (playground) {
  const field = (id) => playground.querySelector(`#${id}`);
  const panes = [...playground.querySelectorAll(".chat > section")].map((section) => ({
    model: section.querySelector(".model"), turns: section.querySelector(".turns"), messages: [],
  }));
  let stop = null;

  const turn = (pane, kind, text) => {
    const made = document.createElement("div");
    made.className = `turn ${kind}`;
    made.textContent = text;
    pane.turns.append(made);
    return made;
  };
  const percent = (p) => `${p >= 0.0995 ? (100 * p).toFixed(0) : (100 * p).toPrecision(2)} %`;
  const shown = (text) => JSON.stringify(text).slice(1, -1);
  const add = (made, bit) => {
    const span = document.createElement("span");
    span.textContent = bit.text;
    const lowest = Math.min(1, ...bit.tokens.map((token) => token.p));
    span.dataset.p = bit.tokens
      .map((token) => `“${shown(token.text)}” ${percent(token.p)}: ${token.top.map(([text, p]) => `“${shown(text)}” ${percent(p)}`).join(", ")}`)
      .join(" · ");
    if (lowest < 0.05) span.className = "p0"; else if (lowest < 0.3) span.className = "p1";
    made.append(span);
  };

  async function answer(pane, text, mode, signal) {
    if (mode === "chat") pane.messages.push({ role: "user", content: text });
    turn(pane, "person", text);
    const made = turn(pane, "model", "");
    const waits = turn(pane, "notice", ""), began = Date.now();
    waits.hidden = true;
    const timer = setInterval(() => {
      waits.hidden = false;
      waits.textContent = `Waiting for ${Math.round((Date.now() - began) / 1000)} s. ${playground.dataset.waits}`;
    }, 2000);
    const begin = () => { clearInterval(timer); waits.remove(); };
    const form = new URLSearchParams({
      model: pane.model.value, mode, prompt: text, messages: JSON.stringify(pane.messages),
      max_tokens: field("max_tokens").value, temperature: field("temperature").value, csrf: playground.dataset.csrf,
    });
    try {
      const response = await fetch(playground.dataset.answer, { method: "POST", body: form, signal });
      if (!(response.headers.get("content-type") || "").startsWith("text/event-stream")) {
        const page = new DOMParser().parseFromString(await response.text(), "text/html");
        throw new Error(page.querySelector("[role=alert]")?.textContent || `the server answered ${response.status}`);
      }
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      for (let rest = "", part; !(part = await reader.read()).done;) {
        const events = (rest + part.value).split("\n\n");
        rest = events.pop();
        for (const one of events.filter((event) => event.startsWith("data: "))) { // the others are comments
          const data = JSON.parse(one.replace(/^data: /, ""));
          if (data.detail) throw new Error(data.detail);
          begin();
          if (data.text) add(made, data);
          if (data.id) {
            const note = document.createElement("small");
            const link = document.createElement("a");
            link.href = playground.dataset.sample + encodeURIComponent(data.id);
            link.textContent = `${data.count} tokens`;
            note.append(link, data.stop === "length" ? ", cut at the limit" : "");
            note.className = "soft";
            made.after(note);
          }
        }
      }
    } catch (error) {
      const words = error.name === "AbortError" ? "stopped" : error.message;
      turn(pane, "notice bad", words).setAttribute("role", "alert");
    }
    begin();
    // A message without an answer, such as one that is too long, would fail all later ones.
    if (mode === "chat" && made.textContent) pane.messages.push({ role: "assistant", content: made.textContent });
    else if (mode === "chat") pane.messages.pop();
  }

  playground.addEventListener("submit", async (event) => {
    event.preventDefault();
    const text = field("say").value, mode = field("mode").value;
    const asked = panes.filter((pane) => pane.model.value.trim());
    if (stop || !asked.length) return;
    stop = new AbortController();
    field("stop").disabled = false;
    field("say").value = "";
    await Promise.all(asked.map((pane) => answer(pane, text, mode, stop.signal)));
    stop = null;
    field("stop").disabled = true;
    field("say").focus();
  });
  field("say").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    playground.requestSubmit();
  });
  field("stop").addEventListener("click", () => stop?.abort());
  field("clear").addEventListener("click", () => panes.forEach((pane) => { pane.messages = []; pane.turns.replaceChildren(); }));
  playground.addEventListener("pointerover", (event) => {
    const word = event.target instanceof Element && event.target.closest("[data-p]");
    if (word) field("probability").textContent = word.dataset.p;
  });
}
