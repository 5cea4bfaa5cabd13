package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
)

// measureServer lets a command measure what a request costs a server with the
// receiver on and off (internal/servercost). It takes what it prints into the
// report as it is, and makes rows of it.
func measureServer(ctx context.Context, rep *report, command string) error {
	const name = "cost to the server per request"
	switch {
	case command == "":
		rep.LeftOut = append(rep.LeftOut, leftOut{name, "no command given with -server-cost"})
		return nil
	case os.Geteuid() != 0:
		rep.LeftOut = append(rep.LeftOut, leftOut{name, "the receiver needs root"})
		return nil
	}
	cmd := exec.CommandContext(ctx, "sh", "-c", command)
	var stdout bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, os.Stderr
	if err := cmd.Run(); err != nil {
		rep.LeftOut = append(rep.LeftOut, leftOut{name, fmt.Sprintf("the command failed: %v", err)})
		return fmt.Errorf("%s: %q: %w", name, command, err)
	}
	var result struct {
		Configs []struct {
			Name   string
			Ratio  float64 `json:"cpu_ratio_median"`
			P25    float64 `json:"cpu_ratio_p25"`
			P75    float64 `json:"cpu_ratio_p75"`
			P99    float64 `json:"p99_ratio_median"`
			CPUOff float64 `json:"cpu_us_per_request_off"`
			CPUOn  float64 `json:"cpu_us_per_request_on"`
		}
	}
	err := json.Unmarshal(stdout.Bytes(), &result)
	if err == nil && len(result.Configs) == 0 {
		err = errors.New("it has none")
	}
	if err != nil {
		rep.LeftOut = append(rep.LeftOut, leftOut{name, "the command printed no JSON object with configurations"})
		return fmt.Errorf("%s: %q printed no JSON object with configurations: %w", name, command, err)
	}
	for _, c := range result.Configs {
		r := row{
			Name: "server's CPU per request, " + c.Name, Subject: "kernel side attached", Value: c.CPUOn, Unit: "us",
			Note: fmt.Sprintf("%.1f us without; quartiles %.2f–%.2f × worse; p99 %.2f × worse", c.CPUOff, c.P25, c.P75, c.P99),
		}
		if c.Ratio > 0 {
			r.RatioTo, r.Ratio = "nothing attached", 1/c.Ratio
		}
		rep.Rows = append(rep.Rows, r)
	}
	rep.ServerCost = stdout.Bytes()
	return nil
}
