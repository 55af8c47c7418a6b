// From a folder on disk no browser starts a worker from a file. The search's own is put in here, as text, by docs/build_site.py.
if (location.protocol === "file:") {
  const source = "SOURCE"
  window.Worker = class extends Worker {
    constructor() {
      super(URL.createObjectURL(new Blob([source])))
    }
  }
}
