// Asks the service. The token comes with the address of the first call, after "#", which no browser sends anywhere; it stays in this tab.
const KEY = "memfit-token";

export class Refused extends Error {
  constructor(status, message) { super(message); this.status = status; }
}

export function takeToken() {
  const found = /^#token=([\w-]+)$/.exec(location.hash);
  if (found) {
    sessionStorage.setItem(KEY, found[1]);
    history.replaceState(null, "", location.pathname);
  }
  return sessionStorage.getItem(KEY);
}

export function setToken(token) {
  if (token) sessionStorage.setItem(KEY, token); else sessionStorage.removeItem(KEY);
}

async function send(path, options = {}) {
  const headers = { ...options.headers, authorization: `Bearer ${sessionStorage.getItem(KEY)}` };
  const answer = await fetch(path, { ...options, headers, cache: "no-store" });
  if (!answer.ok) {
    let message = answer.statusText;
    try { message = (await answer.json()).message; } catch { /* no JSON: the status says it */ }
    throw new Refused(answer.status, message);
  }
  return answer;
}

export async function ask(path) { return (await send(path)).json(); }

export async function post(path, body, headers = {}) {
  const content = body === undefined ? {} : { body: JSON.stringify(body), headers: { ...headers, "content-type": "application/json" } };
  return (await send(path, { method: "POST", ...content })).json();
}

export async function upload(file) {
  return (await (await send("/v1/uploads", { method: "POST", body: file, headers: { "content-type": "application/zip" } })).json()).code;
}

export async function download(path, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(await (await send(path)).blob());
  link.download = name;
  link.click();
  URL.revokeObjectURL(link.href);
}

// Server-sent events, read by hand: the browser's own reader cannot send a token. Goes on after a broken connection where it was.
export async function follow(number, told, signal) {
  let last = "";
  for (let wait = 500; !signal.aborted; wait = Math.min(wait * 2, 8000)) {
    try {
      const answer = await send(`/v1/runs/${number}/stream`, { signal, headers: last ? { "last-event-id": last } : {} });
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      let text = "";
      for (;;) {
        const { value, done } = await reader.read();
        if (done) break;
        wait = 500;
        const parts = (text + value).split("\n\n");
        text = parts.pop();
        for (const part of parts) {
          const fields = Object.fromEntries(part.split("\n").map((line) => [line.slice(0, line.indexOf(":")), line.slice(line.indexOf(":") + 2)]));
          if (fields.id) last = fields.id;
          if (fields.event === "end") return;
          if (fields.event) told(fields.event, JSON.parse(fields.data));
        }
      }
    } catch (error) {
      if (signal.aborted || error instanceof Refused) return;
    }
    await new Promise((done) => setTimeout(done, wait));
  }
}
