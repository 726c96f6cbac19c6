-- wrk sends the requests in the files that it is given, one after the other, and reports in JSON.

local requests, turn = {}, 0

function init(files)
  for _, path in ipairs(files) do
    local file = assert(io.open(path, "rb"))
    requests[#requests + 1] = file:read("*a")
    file:close()
  end
end

function request()
  turn = turn % #requests + 1
  return requests[turn]
end

function done(summary, latency)
  local failed = summary.errors
  io.write(string.format(
    'REPORT {"requests": %d, "duration_us": %d, "p50_us": %d, "p99_us": %d, '
      .. '"refused": %d, "connect": %d, "read": %d, "write": %d, "timeout": %d}\n',
    summary.requests, summary.duration, latency:percentile(50), latency:percentile(99),
    failed.status, failed.connect, failed.read, failed.write, failed.timeout
  ))
end
