/** The server refuses a request, or could not finish it. */
export class RequestError extends Error {
  constructor({ status, message, param = null, code = null, retry_after_s = null }) {
    super(message);
    this.name = "RequestError";
    this.status = status;
    this.param = param;
    this.code = code;
    /** At status 503: in how many seconds there may be room, as the server expects; else null. */
    this.retryAfterS = retry_after_s;
  }
}

/** The server is gone and does not return, or a request can't be continued. */
export class ConnectionLost extends Error {
  constructor(message) {
    super(message);
    this.name = "ConnectionLost";
  }
}
