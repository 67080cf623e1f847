awk '$3 == "ERROR" { count[$4]++ } END { for (name in count) print name, count[name] }' server.log | sort > errors.txt
