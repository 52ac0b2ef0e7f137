// Browsers start no workers for pages that are opened as files. The search of this site runs in a worker, so there an
// invisible frame takes its place: messages go the same ways.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inside = frame.contentWindow;
      this.inside.document.open();
      this.inside.document.write("<html><body></body></html>");
      this.inside.document.close();
      this.inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const load = (source) =>
        new Promise((loaded) => {
          const script = this.inside.document.createElement("script");
          script.src = new URL(source, location.href);
          script.onload = loaded;
          this.inside.document.body.append(script);
        });
      this.inside.importScripts = async (...sources) => {
        for (const source of sources) await load(source);
      };
      this.ready = load(url);
    }

    async postMessage(data) {
      await this.ready;
      this.inside.dispatchEvent(new MessageEvent("message", { data }));
    }
  };
}
