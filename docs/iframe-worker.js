/* A browser starts no worker for a page that was opened from a file, and the theme runs its search in one: there, a frame takes its place. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inside = frame.contentWindow;
      this.waiting = [];
      const { document: page } = this.inside;
      const run = (address) => new Promise((done, failed) => {
        const script = page.createElement("script");
        Object.assign(script, { src: address, onload: done, onerror: failed });
        page.body.append(script);
      });
      this.inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.inside.importScripts = (...addresses) => addresses.reduce((before, each) => before.then(() => run(each)), Promise.resolve());
      run(new URL(url, location.href).href).then(() => {
        const waiting = this.waiting;
        this.waiting = null;
        waiting.forEach((data) => this.postMessage(data));
      });
    }

    postMessage(data) {
      if (this.waiting) this.waiting.push(data);
      else this.inside.dispatchEvent(new MessageEvent("message", { data }));
    }

    terminate() {
      this.inside.frameElement.remove();
    }
  };
}
