package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
)

// measureServer lets a command measure what a request costs a server with the
// receiver on and off. It takes its rows into the report, and the rest as is.
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
	var result struct{ Rows []row }
	if err := json.Unmarshal(stdout.Bytes(), &result); err != nil {
		rep.LeftOut = append(rep.LeftOut, leftOut{name, "the command printed no JSON object"})
		return fmt.Errorf("%s: %q printed no JSON object: %w", name, command, err)
	}
	rep.Rows = append(rep.Rows, result.Rows...)
	rep.ServerCost = stdout.Bytes()
	return nil
}
