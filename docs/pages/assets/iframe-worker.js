// Browsers do not start a worker from a file on disk. docs/build_site.py replaces SOURCE with the source of the search worker.
if (location.protocol === "file:") {
  const source = "SOURCE"
  window.Worker = class extends Worker {
    constructor() {
      super(URL.createObjectURL(new Blob([source])))
    }
  }
}
