package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strconv"
	"strings"
)

// measureRecall lets a command measure how many planted spikes are found when
// the traces are spread over several samplers. It prints the lines of
// BenchmarkRecall of the processor, of which it takes the percentages.
func measureRecall(ctx context.Context, rep *report, command string) error {
	const name = "recall by shards"
	if command == "" {
		rep.LeftOut = append(rep.LeftOut, leftOut{name, "no command given with -recall"})
		return nil
	}
	out, err := exec.CommandContext(ctx, "sh", "-c", command).Output()
	if err != nil {
		rep.LeftOut = append(rep.LeftOut, leftOut{name, fmt.Sprintf("the command failed: %v", err)})
		return fmt.Errorf("%s: %q: %w", name, command, err)
	}
	rows, err := recallRows(out)
	if err != nil {
		rep.LeftOut = append(rep.LeftOut, leftOut{name, err.Error()})
		return fmt.Errorf("%s: %q: %w", name, command, err)
	}
	rep.Rows = append(rep.Rows, rows...)
	return nil
}

// recallRows makes a row of each line that go test prints of BenchmarkRecall.
func recallRows(out []byte) ([]row, error) {
	var rows []row
	lines := bufio.NewScanner(bytes.NewReader(out))
	for lines.Scan() {
		fields := strings.Fields(lines.Text())
		if len(fields) < 2 || !strings.HasPrefix(fields[0], "BenchmarkRecall/") {
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
		found, ok := values["%spikes-found"]
		if !ok {
			return nil, fmt.Errorf("%q tells no %%spikes-found", lines.Text())
		}
		subject := strings.TrimPrefix(fields[0], "BenchmarkRecall/")
		if i := strings.LastIndexByte(subject, '-'); i > 0 {
			subject = subject[:i] // the number of CPUs
		}
		rows = append(rows, row{
			Name: "planted spikes found", Subject: subject, Value: found, Unit: "%",
			Note: fmt.Sprintf("%s %% of their values in a cluster, %s false clusters",
				digits(values["%values-clustered"]), digits(values["false-clusters"])),
		})
	}
	if len(rows) == 0 {
		return nil, errors.New("it printed no line of BenchmarkRecall")
	}
	return rows, nil
}
