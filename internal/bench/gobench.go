package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"strconv"
	"strings"
)

// measureBenchmarks lets a command run benchmarks of the processor's own package, as
// they need its inside, and takes what they print: which planted spikes are found, by one
// sampler and by several that share the traces, and what a step of clustering takes.
func measureBenchmarks(ctx context.Context, rep *report, command string) error {
	const name = "planted spikes, a step of clustering"
	if command == "" {
		rep.LeftOut = append(rep.LeftOut, leftOut{name, "no command given with -benchmarks"})
		return nil
	}
	out, err := exec.CommandContext(ctx, "sh", "-c", command).Output()
	if err != nil {
		rep.LeftOut = append(rep.LeftOut, leftOut{name, fmt.Sprintf("the command failed: %v", err)})
		return fmt.Errorf("%s: %q: %w", name, command, err)
	}
	rows, err := benchmarkRows(out)
	if err != nil {
		rep.LeftOut = append(rep.LeftOut, leftOut{name, err.Error()})
		return fmt.Errorf("%s: %q: %w", name, command, err)
	}
	for i := range rows {
		if rows[i].Name == stepName {
			rows[i].Note = shareOfSpans(rows[i].Value, rep.Rows)
		}
	}
	rep.Rows = append(rep.Rows, rows...)
	return nil
}

// stepName is the row of BenchmarkStep: a second of 20,000 spans/s, of which 2 % are
// spikes.
const stepName = "processor, a step of clustering at 20,000 spans/s"

// shareOfSpans says what a step of so many milliseconds is of what a second's 20,000
// spans take, scattered.
func shareOfSpans(ms float64, rows []row) string {
	i := slices.IndexFunc(rows, func(r row) bool { return r.Name == throughputScattered && r.Subject == "spike_sampling" })
	if i < 0 {
		return ""
	}
	return fmt.Sprintf("%s %% of what the spans of a second take", digits(100*ms/(20_000/rows[i].Value*1e3)))
}

// benchmarkRows makes a row of each line that go test prints of the benchmarks Recall,
// Planted and Step.
func benchmarkRows(out []byte) ([]row, error) {
	var rows []row
	var missing error
	lines := bufio.NewScanner(bytes.NewReader(out))
	for lines.Scan() {
		fields := strings.Fields(lines.Text())
		if len(fields) < 2 || !strings.HasPrefix(fields[0], "Benchmark") {
			continue
		}
		values := map[string]float64{}
		for i := 2; i+1 < len(fields); i += 2 {
			v, err := strconv.ParseFloat(fields[i], 64)
			if err != nil {
				return nil, fmt.Errorf("%q: %w", lines.Text(), err)
			}
			values[fields[i+1]] = v
		}
		name := strings.TrimPrefix(fields[0], "Benchmark")
		if i := strings.LastIndexByte(name, '-'); i > 0 {
			name = name[:i] // the number of CPUs
		}
		name, subject, _ := strings.Cut(name, "/")
		of := func(unit string) float64 {
			v, ok := values[unit]
			if !ok {
				missing = errors.Join(missing, fmt.Errorf("%q tells no %s", lines.Text(), unit))
			}
			return v
		}
		var r row
		switch name {
		case "Recall":
			r = row{
				Name: "planted spikes found", Subject: subject, Value: of("%spikes-found"), Unit: "%",
				Note: fmt.Sprintf("%s %% of their values in a cluster, %s false clusters", digits(of("%values-clustered")), digits(of("false-clusters"))),
			}
		case "Planted":
			r = row{
				Name: "planted spikes found", Subject: subject, Value: of("spikes-of-36"), Unit: "of 36",
				Note: digits(of("false-clusters")) + " false clusters",
			}
		case "Step":
			r = row{Name: stepName, Subject: "spike_sampling", Value: of("ns/op") / 1e6, Unit: "ms"}
		default:
			missing = errors.Join(missing, fmt.Errorf("%q: nobody asked for it", lines.Text()))
		}
		rows = append(rows, r)
	}
	if missing == nil && len(rows) == 0 {
		missing = errors.New("it printed no line of a benchmark")
	}
	return rows, missing
}
